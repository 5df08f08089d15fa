"""Samples laid end to end give what each gives alone: scores, gradients, and nothing of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yunlu.core.errors import ModelError
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)

SMALL: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "dropout": 0.0}
LENGTHS = [5, 1, 12, 3, 12, 7]
both_positions = pytest.mark.parametrize("positions", ["rotary", "learned"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(lengths: list[int] = LENGTHS) -> list[Tensor]:
    return [torch.randint(3, 40, (length,)) for length in lengths]


def pad(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


def lay(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(samples), torch.tensor([len(sample) for sample in samples])


def loss_and_gradients(model: nn.Module, scores: Tensor, targets: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(scores, targets)
    loss.backward()
    found = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [loss.detach(), *[g.clone() for g in found if g is not None]]


def assert_close(ones: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@both_positions
def test_a_classifier_answers_packed_samples_as_padded_and_single_ones(positions: Any) -> None:
    model = TransformerClassifier(
        vocabulary=40, classes=4, max_length=12, positions=positions, **SMALL
    )
    samples, targets = draw(), torch.tensor([0, 1, 2, 3, 0, 1])
    packed, padded = model(*lay(samples)), model(*pad(samples))
    alone = torch.cat([model(*pad([sample])) for sample in samples])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    one = loss_and_gradients(model, packed, targets)
    assert_close(one, loss_and_gradients(model, padded, targets))


@both_positions
def test_a_causal_model_keeps_packed_documents_apart(positions: Any) -> None:
    model = CausalTransformer(vocabulary=40, max_length=12, positions=positions, **SMALL)
    samples = draw()
    ids, lengths = lay(samples)
    alone = torch.cat([model(sample[None])[0] for sample in samples])
    packed = model(ids, lengths)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    targets = ids.roll(-1)
    one = loss_and_gradients(model, packed, targets)
    assert_close(one, loss_and_gradients(model, alone, targets))


@both_positions
def test_packed_targets_read_their_own_sources_only(positions: Any) -> None:
    model = Seq2SeqTransformer(vocabulary=40, max_length=12, positions=positions, **SMALL)
    sources, targets = draw(), draw([2, 9, 4, 1, 3, 12])
    source, source_lengths = lay(sources)
    target, target_lengths = lay(targets)
    padded_target, target_mask = pad(targets)
    packed = model(source, source_lengths, target, target_lengths)
    padded = model(*pad(sources), padded_target)[target_mask]
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-6)
    wanted = target.roll(-1)
    one = loss_and_gradients(model, packed, wanted)
    assert_close(one, loss_and_gradients(model, padded, wanted))


@both_positions
@pytest.mark.parametrize("changed", [0, 2, 5])
def test_a_changed_sample_changes_no_other(positions: Any, changed: int) -> None:
    classifier = TransformerClassifier(
        vocabulary=40, classes=4, max_length=12, positions=positions, **SMALL
    )
    causal = CausalTransformer(vocabulary=40, max_length=12, positions=positions, **SMALL)
    samples = draw()
    others = [i for i in range(len(samples)) if i != changed]
    different = [42 - sample if i == changed else sample for i, sample in enumerate(samples)]
    before, after = classifier(*lay(samples)), classifier(*lay(different))
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[changed], after[changed])
    before, after = (causal(*lay(some)).split(LENGTHS) for some in (samples, different))
    assert all(torch.equal(before[i], after[i]) for i in others)
    assert not torch.allclose(before[changed], after[changed])


def test_many_short_samples_may_be_longer_than_the_model_but_none_alone() -> None:
    model = TransformerClassifier(vocabulary=40, classes=4, max_length=4, **SMALL)
    assert model(*lay(draw([4, 4, 4, 1]))).shape == (4, 4)
    with pytest.raises(ModelError, match="5 tokens"):
        model(*lay(draw([4, 5])))
