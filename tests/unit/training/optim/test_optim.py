from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from yunlu.core.errors import ModelError
from yunlu.spec.train import OptimizerSpec, ScheduleSpec
from yunlu.training.optim.build import build_optimizer
from yunlu.training.optim.schedule import Plateau, rate

NAMES = ["constant", "linear", "cosine", "wsd", "plateau"]


def curve(spec: ScheduleSpec, steps: int = 100, warmup: int = 10) -> list[float]:
    return [rate(spec, step, steps=steps, warmup_steps=warmup) for step in range(steps)]


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_climbs_to_its_peak_then_never_rises(name: str) -> None:
    rates = curve(ScheduleSpec.model_validate({"name": name, "final": 0.1}))
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_the_shapes_are_what_their_names_say() -> None:
    middle = 55  # half-way between the end of the warm-up and the end
    assert curve(ScheduleSpec(name="linear"))[middle] == pytest.approx(0.5)
    assert curve(ScheduleSpec(name="cosine"))[middle] == pytest.approx(0.5)
    assert curve(ScheduleSpec(name="cosine"))[-1] == pytest.approx(0.0, abs=1e-3)
    stable = curve(ScheduleSpec(name="wsd", decay=0.5))
    assert stable[middle] == 1.0
    assert stable[78] == pytest.approx(1 - (78 - 55) / 45)


@given(st.sampled_from(NAMES), st.integers(1, 500), st.integers(0, 600), st.floats(0, 1))
def test_the_rate_stays_between_zero_and_one(
    name: str, steps: int, warmup: int, final: float
) -> None:
    spec = ScheduleSpec.model_validate({"name": name, "final": final})
    for step in (0, steps // 2, steps - 1):
        assert 0 <= rate(spec, step, steps=steps, warmup_steps=min(warmup, steps)) <= 1


def test_a_plateau_lowers_the_rate_after_its_patience() -> None:
    plateau = Plateau(factor=0.5, patience=2)
    assert [plateau.observe(improved=good) for good in (True, False, False, False, False)] == [
        False, False, True, False, True,
    ]  # fmt: skip
    assert plateau.scale == 0.25


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lamb", "lars"])
def test_every_optimiser_lowers_a_simple_loss(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    spec = OptimizerSpec.model_validate({"name": name})
    lr = {"lars": 1.0, "sgd": 0.1}.get(name, 0.02)
    optimizer = build_optimizer(model, spec, lr=lr, weight_decay=0.0, l2=0.0)
    losses: list[float] = []
    for _ in range(300):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_l2_equals_the_penalty_written_out_and_spares_biases() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 3)
    built = build_optimizer(model, OptimizerSpec(name="sgd"), lr=0.1, weight_decay=9.0, l2=0.3)
    model(inputs).square().sum().backward()
    built.step()
    penalty = 0.3 / 2 * twin.weight.square().sum()
    (twin(inputs).square().sum() + penalty).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias, twin.bias)


def test_weight_decay_of_adamw_moves_matrices_only() -> None:
    model = nn.Linear(3, 2)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    built = build_optimizer(model, OptimizerSpec(name="adamw"), lr=0.1, weight_decay=0.5, l2=0.0)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    built.step()
    torch.testing.assert_close(model.weight, before["weight"] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(model.bias, before["bias"])


def test_a_model_without_trainable_weights_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    with pytest.raises(ModelError, match="no trainable weights"):
        build_optimizer(model, OptimizerSpec(), lr=0.1, weight_decay=0.0, l2=0.0)


def test_warm_up_starts_above_zero() -> None:
    assert math.isclose(curve(ScheduleSpec())[0], 1 / 11)
