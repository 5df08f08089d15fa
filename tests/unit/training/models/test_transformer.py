from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from yunlu.core.errors import ModelError
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
    rotary_angles,
    rotate,
)

SMALL: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_causal_model_never_sees_the_future(positions: Any) -> None:
    model = CausalTransformer(vocabulary=11, max_length=8, positions=positions, **SMALL).eval()
    ids = torch.randint(0, 11, (2, 8))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_word_order_matters_to_the_classifier(positions: Any) -> None:
    model = TransformerClassifier(
        vocabulary=11, classes=3, max_length=8, positions=positions, **SMALL
    ).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    assert not torch.allclose(model(ids, mask), model(ids.flip(1), mask), atol=1e-6)


def test_padding_does_not_change_a_classification() -> None:
    model = TransformerClassifier(vocabulary=11, classes=3, max_length=8, **SMALL).eval()
    ids = torch.randint(0, 11, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.bool)
    padded = torch.nn.functional.pad(ids, (0, 3), value=7)
    longer = torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(model(ids, mask), model(padded, longer))


def test_rotary_attention_depends_on_distance_alone() -> None:
    angles = rotary_angles(10, 8)
    query, key = torch.randn(8), torch.randn(8)

    def score(query_at: int, key_at: int) -> float:
        turned = [rotate(vector.expand(1, 1, 10, 8), angles)[0, 0] for vector in (query, key)]
        return float(turned[0][query_at] @ turned[1][key_at])

    assert score(3, 1) == pytest.approx(score(9, 7), abs=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)


def test_an_untrained_model_is_as_unsure_as_can_be() -> None:
    model = CausalTransformer(vocabulary=50, max_length=32, width=64, layers=4)
    ids, targets = torch.randint(0, 50, (2, 8, 32))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.2)


def test_an_untied_head_has_weights_of_its_own() -> None:
    tied = CausalTransformer(vocabulary=50, max_length=8, **SMALL)
    untied = CausalTransformer(vocabulary=50, max_length=8, tied=False, **SMALL)
    assert "head.weight" in untied.state_dict()
    assert "head.weight" not in tied.state_dict()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 30, "heads": 4}, "width: 30 does not divide into 4 heads"),
        ({"layers": 0}, "at least 1"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_sizes_that_make_no_model_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        CausalTransformer(vocabulary=9, max_length=8, **changes)


def test_a_sequence_beyond_the_longest_is_refused_in_words() -> None:
    model = CausalTransformer(vocabulary=9, max_length=4, **SMALL)
    with pytest.raises(ModelError, match="5 tokens is longer than the model's 4"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def seq2seq() -> Seq2SeqTransformer:
    return Seq2SeqTransformer(vocabulary=12, max_length=9, **SMALL).eval()


def test_padding_of_the_source_does_not_change_the_answer() -> None:
    model = seq2seq()
    source, target = torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 4))
    mask = torch.ones(2, 5, dtype=torch.bool)
    padded = torch.nn.functional.pad(source, (0, 2), value=3)
    longer = torch.nn.functional.pad(mask, (0, 2))
    torch.testing.assert_close(model(source, mask, target), model(padded, longer, target))


def test_the_decoder_reads_the_source_and_never_the_future() -> None:
    model = seq2seq()
    source, target = torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 4))
    mask = torch.ones(2, 5, dtype=torch.bool)
    answer = model(source, mask, target)
    later = target.clone()
    later[:, 3] = (later[:, 3] + 1) % 12
    torch.testing.assert_close(model(source, mask, later)[:, :3], answer[:, :3])
    assert not torch.allclose(model((source + 1) % 12, mask, target), answer)


def test_generate_writes_what_the_forward_pass_likes_best_and_stops_at_the_end() -> None:
    model = seq2seq()
    source, mask = torch.randint(0, 12, (3, 5)), torch.ones(3, 5, dtype=torch.bool)
    written = model.generate(source, mask, bos=1, eos=2, max_length=6)
    given = torch.cat((torch.ones(3, 1, dtype=torch.int64), written[:, :-1]), dim=1)
    best = model(source, mask, given).argmax(dim=-1)
    for row, wanted in zip(written.tolist(), best.tolist(), strict=True):
        end = row.index(2) + 1 if 2 in row else len(row)
        assert row[:end] == wanted[:end]
        assert set(row[end:]) <= {2}
