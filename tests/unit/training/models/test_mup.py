"""One rate for all widths: what stays the same, what the rule is worth, and that the best rate carries over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.core.errors import ModelError
from yunlu.training.models.transformer import (
    Block,
    CausalTransformer,
    ScaledNorm,
    TransformerClassifier,
    find_width_rule,
    initialize,
)

VOCABULARY = 32


def make(width: int, *, base: int | None, seed: int = 0, **more: Any) -> CausalTransformer:
    torch.manual_seed(seed)
    given: dict[str, Any] = {"layers": 2, "heads": 2, **more}
    return CausalTransformer(
        vocabulary=VOCABULARY, max_length=16, width=width, mup_base=base, **given
    )


def make_batches(count: int, *, samples: int = 16, seed: int = 1) -> list[Tensor]:
    """Walks whose next token is the last one or two plus one of a few steps: learnt in few updates."""
    random = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (count, samples, 16), generator=random)
    starts = torch.randint(0, VOCABULARY, (count, samples, 1), generator=random)
    return list((starts + (steps * steps + 1).cumsum(dim=2)) % VOCABULARY)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    scores = model(ids[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, batches: list[Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    for ids in batches:
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_at_its_base_width_a_model_is_the_standard_one_to_the_last_bit(kind: str) -> None:
    def build(**more: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocabulary": VOCABULARY,
            "max_length": 16,
            "width": 32,
            "heads": 2,
        }
        if kind == "causal":
            return CausalTransformer(**sizes, **more)
        return TransformerClassifier(**sizes, classes=3, dropout=0.0, **more)

    def answer(model: nn.Module) -> Tensor:
        ids = make_batches(1)[0]
        return model(ids) if kind == "causal" else model(ids, torch.ones_like(ids))

    plain, based = build(), build(mup_base=32)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), based.parameters(), strict=True)
    )
    assert torch.equal(answer(plain), answer(based))
    assert not any(isinstance(module, ScaledNorm) for module in based.modules())


def test_without_a_base_blocks_and_first_weights_are_as_they_were() -> None:
    torch.manual_seed(0)
    block = Block(16, 2, dropout=0.0)
    assert [type(module) for module in block.modules() if isinstance(module, nn.LayerNorm)] == [
        nn.LayerNorm
    ] * 2
    initialize(block, residuals=1)
    assert block.feed.up.weight.std().item() == pytest.approx(16**-0.5, rel=0.1)


def split_rates(model: CausalTransformer, lr: float, ratio: float) -> list[dict[str, Any]]:
    hidden = [w for name, w in model.named_parameters() if "layers." in name and w.ndim == 2]
    others = [w for name, w in model.named_parameters() if not ("layers." in name and w.ndim == 2)]
    return [{"params": hidden, "lr": lr / ratio}, {"params": others, "lr": lr}]


@pytest.mark.parametrize("packed", [False, True])
def test_gains_inside_the_model_are_worth_rates_for_each_group(packed: bool) -> None:
    """The table's own form: hidden matrices at a rate divided by the ratio, the head's scores divided too."""
    ratio, lr = 4, 0.01
    ours = make(64, base=16, tied=False).double()
    table = make(64, base=None, tied=False).double()
    with torch.no_grad():
        for mine, theirs in zip(ours.named_parameters(), table.named_parameters(), strict=True):
            inside = "layers." in mine[0] and mine[1].ndim == 2
            theirs[1].copy_(mine[1] / ratio if inside else mine[1])
    scale = (16 / 2) ** 0.5 / (64 / 2)
    for layer in table.layers:
        assert isinstance(layer, Block)
        layer.attention.query.register_forward_hook(
            # torch divides by the root of the head's width.
            lambda _module, _args, out: out * (scale * (64 / 2) ** 0.5)
        )
    hook: Any = table.norm.register_forward_hook
    hook(lambda _module, _args, out: out / ratio)  # pyright: ignore[reportUnknownLambdaType]
    # The invariance is exact without Adam's epsilon only.
    one = torch.optim.Adam(ours.parameters(), lr=lr, eps=1e-30)
    several = torch.optim.Adam(split_rates(table, lr, ratio), eps=1e-30)
    batches = make_batches(6)
    losses = train(ours, batches, one), train(table, batches, several)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    ids = batches[0]
    if packed:
        lengths = torch.tensor([5, 11])
        torch.testing.assert_close(ours(ids[0], lengths), table(ids[0], lengths))
    else:
        torch.testing.assert_close(ours(ids), table(ids))


def sizes_after(width: int, *, base: int | None, steps: int) -> dict[str, float]:
    """How far a few steps have moved what the layers answer, in the mean of its components."""
    batches = make_batches(steps + 1)
    model = make(width, base=base)
    told: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def note(_module: nn.Module, _args: Any, out: Tensor) -> None:
            told[name] = out.detach()

        return note

    for name, module in model.named_modules():
        if name.endswith((".query", ".out", ".down")):
            module.register_forward_hook(listen(name))
    with torch.no_grad():
        told["scores"] = model(batches[-1])
    before = dict(told)
    train(model, batches[:-1], torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0))
    with torch.no_grad():
        told["scores"] = model(batches[-1])
    return {name: (told[name] - before[name]).abs().mean().item() for name in told}


def test_a_few_steps_move_activations_alike_at_all_widths() -> None:
    """The coordinate check (Yang et al. 2022, appendix D.1)."""
    widths = (32, 64, 128, 256)
    level = [sizes_after(width, base=32, steps=3) for width in widths]
    growing = [sizes_after(width, base=None, steps=3) for width in widths]

    def growth(found: list[dict[str, float]]) -> dict[str, float]:
        """The exponent of the width with which each grows."""
        octaves = math.log2(widths[-1] / widths[0])
        return {name: math.log2(found[-1][name] / found[0][name]) / octaves for name in found[0]}

    assert max(growth(level).values()) < 0.2
    assert min(growth(level).values()) > -0.35
    standard = growth(growing)
    assert standard["scores"] > 0.4
    assert max(standard.values()) > 0.6


def final_loss(width: int, lr: float, *, base: int | None) -> float:
    model = make(width, base=base, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = train(model, make_batches(30), optimizer)
    return sum(losses[-6:]) / 6


def find_best(width: int, *, base: int | None) -> float:
    """The best rate in octaves above the lowest: the ground of a parabola through the three best."""
    losses = [final_loss(width, 0.002 * 2**octave, base=base) for octave in range(6)]
    best = losses.index(min(losses))
    assert 0 < best < len(losses) - 1, "the grid must hold the optimum"
    left, middle, right = losses[best - 1 : best + 2]
    return best + (left - right) / (left - 2 * middle + right) / 2


@pytest.mark.slow
def test_the_best_rate_carries_over_from_a_narrow_model() -> None:
    narrow = find_best(32, base=None)
    assert abs(find_best(128, base=32) - narrow) < 0.6
    assert find_best(128, base=None) < narrow - 1, "the standard form has another at each width"


def test_fewer_heads_of_the_same_width_leave_attention_as_it_is() -> None:
    assert find_width_rule(128, 8, mup_base=32, mup_heads=2).attention_scale is None
    narrower = find_width_rule(128, 8, mup_base=32, mup_heads=None)
    assert narrower.attention_scale == pytest.approx(4**0.5 / 16)
    assert narrower.gain == 0.25


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mup_base": 0}, "mup_base 0"),
        ({"mup_base": 16, "mup_heads": 0}, "mup_heads 0"),
        ({"mup_heads": 2}, "there is no base"),
    ],
)
def test_a_base_that_is_none_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        CausalTransformer(vocabulary=8, max_length=8, width=32, **arguments)
