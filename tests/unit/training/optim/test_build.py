from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.checkpoints import copy_optimizer, restore_optimizer
from yunlu.core.errors import ModelError, TrainingError
from yunlu.planning.large_batch import rate
from yunlu.spec.train import OptimizerSpec, ScheduleSpec
from yunlu.training.batch_schedule import Plateau
from yunlu.training.optim.build import build_optimizer, kernels_for

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


def small_model(hidden: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Learn to name the largest of ten sums; returns the last loss."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(128, 64, generator=draw)
    labels = (inputs @ torch.randn(64, 10, generator=draw)).argmax(-1)
    loss = torch.zeros(())
    for step in steps:
        for group in optimizer.param_groups:  # as the engine does, with a plain number
            group["lr"] = 3e-3 / (1 + step / 50)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec(name="sgd"),
        OptimizerSpec(name="momentum", nesterov=True),
        OptimizerSpec(name="adam"),
        OptimizerSpec(name="adamw"),
    ],
    ids=lambda spec: spec.name,
)
def test_every_kernel_gives_the_same_weights(spec: OptimizerSpec) -> None:
    results: dict[str, nn.Module] = {}
    for kernel in kernels_for(small_model(), spec):
        model = small_model()
        optimizer = build_optimizer(model, spec, lr=1e-3, weight_decay=0.1, l2=0.01, kernel=kernel)
        used = {name for name in ("fused", "foreach") if optimizer.param_groups[0][name]}
        assert used == {kernel} - {"single"}
        train(model, optimizer, range(10))
        results[kernel] = model
    assert list(results) == ["fused", "foreach", "single"]
    for model in results.values():
        for weight, other in zip(model.parameters(), results["single"].parameters(), strict=True):
            torch.testing.assert_close(weight, other, atol=1e-5, rtol=1e-4)


def test_kernels_that_do_not_exist_are_neither_offered_nor_used() -> None:
    assert kernels_for(small_model(), OptimizerSpec(name="lamb")) == ["single"]
    turned = nn.Linear(2, 2, dtype=torch.complex64)
    assert kernels_for(turned, OptimizerSpec()) == ["foreach", "single"]
    built = build_optimizer(turned, OptimizerSpec(), lr=0.1, weight_decay=0.0, l2=0.0)
    assert not built.defaults["fused"]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_8_bit_states_train_as_whole_ones_in_a_quarter_of_the_memory(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    losses: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for state in ("fp32", "8bit"):
        model = small_model(hidden=512)
        spec = OptimizerSpec.model_validate({"name": name, "state": state})
        optimizer = build_optimizer(model, spec, lr=3e-3, weight_decay=0.1, l2=1e-3)
        first = train(model, optimizer, range(1))
        losses[state] = train(model, optimizer, range(1, 50))
        assert losses[state] < 0.1 * first
        tensors, _ = copy_optimizer(model, optimizer)
        sizes[state] = sum(value.nbytes for value in tensors.values())
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.1)
    assert losses["8bit"] != losses["fp32"]
    assert sizes["8bit"] < 0.3 * sizes["fp32"]  # biases stay whole; tables take a little too


def test_8_bit_states_resume_bit_for_bit() -> None:
    pytest.importorskip("bitsandbytes")
    spec = OptimizerSpec(name="adam", state="8bit")

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, spec, lr=3e-3, weight_decay=0.0, l2=1e-3)

    model = small_model()
    optimizer = build(model)
    train(model, optimizer, range(5))
    tensors, packed = copy_optimizer(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(5, 10))

    resumed = small_model()
    resumed.load_state_dict(weights)
    again = build(resumed)
    restore_optimizer(resumed, again, tensors, packed)
    train(resumed, again, range(5, 10))
    for weight, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(weight, other)
    kept, _ = copy_optimizer(model, optimizer)
    other_kept, _ = copy_optimizer(resumed, again)
    assert any(value.dtype == torch.uint8 for value in kept.values())
    assert kept.keys() == other_kept.keys()
    assert all(torch.equal(value, other_kept[name]) for name, value in kept.items())


def test_8_bit_adam_couples_its_penalty_as_the_whole_one() -> None:
    pytest.importorskip("bitsandbytes")
    results: list[nn.Linear] = []
    for state in ("fp32", "8bit"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)  # small enough to be kept whole: the same numbers
        spec = OptimizerSpec.model_validate({"name": "adam", "state": state})
        optimizer = build_optimizer(model, spec, lr=0.1, weight_decay=9.0, l2=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).square().sum().backward()
            optimizer.step()
        results.append(model)
    torch.testing.assert_close(results[0].weight, results[1].weight)
    torch.testing.assert_close(results[0].bias, results[1].bias)


def test_8_bit_states_of_another_rule_are_refused() -> None:
    with pytest.raises(TrainingError, match="lars has no 8-bit state"):
        build_optimizer(
            small_model(),
            OptimizerSpec(name="lars", state="8bit"),
            lr=0.1,
            weight_decay=0.0,
            l2=0.0,
        )
