"""Gradients that are freed at once train the same weights, with less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import AveragedModel

from tests.checkpoints import copy_optimizer, restore_optimizer
from yunlu.core.errors import TrainingError
from yunlu.spec.train import OptimizerSpec
from yunlu.training.memory.gradient_release import ReleasingOptimizer, release_gradients
from yunlu.training.memory.peak import peak_bytes
from yunlu.training.memory.recompute import apply_recompute
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.optim.build import build_optimizer

IDS = torch.arange(3 * 10).reshape(3, 10) * 7 % 30


def tied() -> nn.Module:
    """The embedding is the output layer too: its gradient comes in two parts."""
    torch.manual_seed(0)
    return CausalTransformer(vocabulary=30, max_length=10, width=16, layers=2, heads=2).train()


def loss_of(model: nn.Module, step: int) -> Tensor:
    scores = model(IDS.roll(step, dims=0))
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def factory(name: str, **details: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    spec = OptimizerSpec.model_validate({"name": name, **details})
    decay = 0.1 if name in {"adamw", "lamb", "lars"} else 0.0
    return lambda model: build_optimizer(model, spec, lr=0.0, weight_decay=decay, l2=0.0)


def set_rate(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)


def train_ordinarily(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, l1: float = 0.0
) -> list[float]:
    norms: list[float] = []
    for step in steps:
        set_rate(optimizer, step)
        loss_of(model, step).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        for weight in model.parameters():
            if l1 and weight.grad is not None:
                weight.grad.add_(weight.detach().sign(), alpha=l1)
        norms.append(float(get_total_norm(gradients)))
        if l1:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms


def train_releasing(model: nn.Module, optimizer: ReleasingOptimizer, steps: range) -> list[float]:
    norms: list[float] = []
    for step in steps:
        set_rate(optimizer, step)
        loss_of(model, step).backward()
        norms.append(float(optimizer.norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert float(optimizer.norm) == norms[-1]
    return norms


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), yours in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours), name


@pytest.mark.parametrize(
    "make",
    [
        factory("sgd"),
        factory("momentum", nesterov=True),
        factory("adam"),
        factory("adamw"),
        factory("adamw", kernel="single"),
        factory("lamb"),
        factory("lars"),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "adamw single", "lamb", "lars"],
)
def test_twenty_steps_give_the_same_weights_and_norms(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    plain, released = tied(), tied()
    expected = train_ordinarily(plain, make(plain), range(20))
    optimizer = release_gradients(released, make)
    assert train_releasing(released, optimizer, range(20)) == pytest.approx(expected, rel=1e-6)
    assert_same_weights(released, plain)
    assert not torch.equal(released.embedding.token.weight, tied().embedding.token.weight)


def test_penalty_and_bound_of_single_components_still_work() -> None:
    plain, released, make = tied(), tied(), factory("sgd")
    expected = train_ordinarily(plain, make(plain), range(5), l1=1e-3)
    optimizer = release_gradients(released, make, l1=1e-3, clip_value=0.01)
    assert train_releasing(released, optimizer, range(5)) == pytest.approx(expected, rel=1e-6)
    assert_same_weights(released, plain)


def test_no_gradient_outlives_its_update_and_the_peak_is_lower() -> None:
    make = factory("sgd")

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    plain, released = build(), build()
    optimizer = release_gradients(released, make)
    alive: list[int] = []

    def count(_weight: Tensor) -> None:
        alive.append(sum(weight.grad is not None for weight in released.parameters()))

    for weight in released.parameters():
        weight.register_post_accumulate_grad_hook(count)  # after the update
    inputs = torch.ones(1, 64)
    ordinary = peak_bytes(lambda: plain(inputs).sum().backward())
    thrifty = peak_bytes(lambda: released(inputs).sum().backward())
    assert alive == [0] * 8
    one = 64 * 64 * 4
    assert ordinary > 8 * one
    assert thrifty < 3 * one  # one gradient, and what its norm and update take
    assert optimizer.norm > 0


def test_a_checkpoint_fits_both_the_releasing_and_the_ordinary_optimiser() -> None:
    for name in ("adamw", "lamb"):
        make = factory(name)
        whole = tied()
        train_releasing(whole, release_gradients(whole, make), range(6))
        broken = tied()
        first = release_gradients(broken, make)
        train_releasing(broken, first, range(3))
        saved = copy_optimizer(broken, first)
        resumed, ordinary = copy.deepcopy(broken), copy.deepcopy(broken)
        second = release_gradients(resumed, make)
        restore_optimizer(resumed, second, *saved)
        train_releasing(resumed, second, range(3, 6))
        assert_same_weights(resumed, whole)
        third = make(ordinary)
        restore_optimizer(ordinary, third, *saved)
        train_ordinarily(ordinary, third, range(3, 6))
        assert_same_weights(ordinary, whole)


def test_it_goes_together_with_recomputation_and_averages() -> None:
    make = factory("adamw")
    plain, released = tied(), tied()
    train_ordinarily(plain, make(plain), range(5))
    optimizer = release_gradients(released, make)
    average = AveragedModel(released)
    apply_recompute(released, "full")
    train_releasing(released, optimizer, range(5))
    assert_same_weights(released, plain)
    assert_same_weights(average.module, tied())
    loss_of(average.module, 0).backward()  # a copy is not watched
    assert average.module.embedding.token.weight.grad is not None


def test_a_second_backward_pass_in_one_step_is_refused() -> None:
    model = tied()
    release_gradients(model, factory("sgd"))
    loss_of(model, 0).backward()
    with pytest.raises(TrainingError, match="second gradient"):
        loss_of(model, 1).backward()


def test_closed_it_keeps_gradients_again() -> None:
    model = tied()
    release_gradients(model, factory("sgd")).close()
    loss_of(model, 0).backward()
    assert all(weight.grad is not None for weight in model.parameters())
