from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from yunlu.training.optim.fused_adam import FrozenAdam, FusedAdam

_BETAS, _EPS, _LR, _DECAY = (0.9, 0.98), 1e-8, 0.01, 0.1


def make(kind: type[FusedAdam], weight: Tensor, *, decoupled: bool = True) -> Any:
    groups = [{"params": [weight], "weight_decay": _DECAY}]
    return kind(groups, lr=_LR, betas=_BETAS, eps=_EPS, decoupled=decoupled)


def gradient(step: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(step))


def take_steps(optimizer: Any, weight: Tensor, steps: range) -> None:
    for step in steps:
        weight.grad = gradient(step)
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_held_still_it_is_momentum_with_a_rate_for_each_weight(decoupled: bool) -> None:
    weight = torch.ones(5)
    optimizer = make(FrozenAdam, weight, decoupled=decoupled)
    take_steps(optimizer, weight, range(10))
    kept = optimizer.state[weight]
    expected, mean = weight.clone(), kept["exp_avg"].clone()
    size = (kept["exp_avg_sq"] / (1 - _BETAS[1] ** 10)).sqrt()
    size.clamp_(min=0.1 * float(size.square().mean().sqrt()))
    optimizer.freeze()
    take_steps(optimizer, weight, range(10, 14))
    for step in range(10, 14):
        share = gradient(step)
        if decoupled:
            expected.mul_(1 - _LR * _DECAY)
        else:
            share = share + _DECAY * expected
        mean.mul_(0.9).add_(share, alpha=0.1)
        expected.sub_(_LR / (1 - 0.9 ** (step + 1)) * mean / (size + _EPS))
    assert torch.allclose(weight, expected, atol=1e-6)
    assert torch.allclose(kept["exp_avg_sq"].sqrt(), size)


def test_until_then_it_is_adam_and_afterwards_again() -> None:
    weights = [torch.ones(5), torch.ones(5)]
    plain, frozen = (
        make(kind, weight) for kind, weight in zip((FusedAdam, FrozenAdam), weights, strict=True)
    )
    for optimizer, weight in zip((plain, frozen), weights, strict=True):
        take_steps(optimizer, weight, range(5))
    assert torch.equal(*weights)
    frozen.freeze()
    frozen.freeze()  # once is enough
    assert frozen.is_frozen
    frozen.thaw()
    assert not frozen.is_frozen
    squares = [
        optimizer.state[weight]["exp_avg_sq"]
        for optimizer, weight in zip((plain, frozen), weights, strict=True)
    ]
    large = squares[0] > 0.02 * squares[0].mean()
    assert torch.allclose(squares[0][large], squares[1][large])


def test_a_weight_whose_gradient_was_always_zero_does_not_run_away() -> None:
    weight = torch.ones(5)
    optimizer = make(FrozenAdam, weight)
    for step in range(5):
        weight.grad = gradient(step)
        weight.grad[2] = 0.0
        optimizer.step()
    optimizer.freeze()
    weight.grad = torch.ones(5)  # as one bit would give it
    optimizer.step()
    assert float((weight - 1).abs().max()) < 1.0


def test_a_checkpoint_knows_that_it_is_held() -> None:
    weights = [torch.ones(5), torch.ones(5)]
    first, second = (make(FrozenAdam, weight) for weight in weights)
    take_steps(first, weights[0], range(3))
    first.freeze()
    weights[1].copy_(weights[0])
    second.load_state_dict(first.state_dict())
    assert second.is_frozen
    for optimizer, weight in zip((first, second), weights, strict=True):
        take_steps(optimizer, weight, range(3, 6))
    assert torch.equal(*weights)
