"""A task that is learnt with compressed gradients as with whole ones, at equal samples.

Digits with some labels wrong, so that the loss has a floor that is not zero; four workers. Margins are
of the final loss over all samples, relative to training with whole gradients.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.unit.training.communication.crowd import run_workers
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.compressed import CompressedAllReduce
from yunlu.training.communication.powersgd import MatrixSlice, PowerSgdAllReduce, as_matrix
from yunlu.training.optim.fused_adam import FrozenAdam, FusedAdam

if TYPE_CHECKING:
    from yunlu.training.communication.compressed import LossyAllReduce
    from yunlu.training.communication.transport import Transport

_WORKERS, _STEPS, _WARM_UP, _BATCH = 4, 100, 20, 16
_DIGITS: Any = load_digits(return_X_y=True)


@cache
def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.tensor(_DIGITS[0], dtype=torch.float32) / 16
    labels = torch.tensor(_DIGITS[1])
    wrong = torch.rand(len(labels), generator=draw) < 0.2
    noise = torch.randint(10, (len(labels),), generator=draw)
    return images, torch.where(wrong, noise, labels)


def make_model() -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.15, 0.15, generator=draw)
    return model


def matrices_of(model: nn.Module) -> list[MatrixSlice]:
    found: list[MatrixSlice] = []
    start = 0
    for weight in model.parameters():
        matrix = as_matrix(start, weight)
        found += [matrix] if matrix else []
        start += weight.numel()
    return found


def make_sum(name: str, **options: Any) -> LossyAllReduce:
    if name == "powersgd":
        return PowerSgdAllReduce({0: matrices_of(make_model())}, **options)
    return CompressedAllReduce(make_codec(name, **options))


def train(name: str, *, warm_up: bool = False, **options: Any) -> float:
    """The loss over all samples after training; ``warm_up``: at first four bits, then Adam held still."""
    images, labels = data()

    def work(transport: Transport) -> tuple[float, list[nn.Parameter]]:
        model = make_model()
        weights = list(model.parameters())
        groups = [{"params": weights, "weight_decay": 0.01}]
        kind = FrozenAdam if warm_up else FusedAdam
        optimizer = kind(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-8, decoupled=True)
        allreducer = make_sum("int4" if warm_up else name, **({} if warm_up else options))
        draw = torch.Generator().manual_seed(2)
        for step in range(_STEPS):
            if warm_up and step == _WARM_UP:
                assert isinstance(optimizer, FrozenAdam)
                assert isinstance(allreducer, CompressedAllReduce)
                optimizer.freeze()
                allreducer.switch(make_codec(name, **options))
            batch = torch.randint(len(labels), (_WORKERS, _BATCH), generator=draw)[transport.rank]
            loss = cross_entropy(model(images[batch]), labels[batch]) / _WORKERS
            gradients = torch.autograd.grad(loss, weights)
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            allreducer(transport, flat, 0, step)
            parts = flat.split([weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.view_as(weight)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - step / _STEPS)
            optimizer.step()
        with torch.no_grad():
            return float(cross_entropy(model(images), labels)), weights

    found = run_workers(work, _WORKERS)
    for _, weights in found[1:]:
        assert all(map(torch.equal, weights, found[0][1]))
    return found[0][0]


@cache
def dense() -> float:
    return train("none")


def test_whole_gradients_learn() -> None:
    images, labels = data()
    before = float(cross_entropy(make_model()(images), labels).detach())
    assert dense() < 0.55 * before


@pytest.mark.parametrize(
    ("name", "margin"), [("fp16", 0.001), ("bf16", 0.002), ("int8", 0.005), ("int4", 0.01)]
)
def test_near(name: str, margin: float) -> None:
    assert train(name) == pytest.approx(dense(), rel=margin)


def test_one_bit_is_near_after_a_warm_up_with_four_and_adam_held_still() -> None:
    assert train("onebit", warm_up=True) < 1.01 * dense()


@pytest.mark.parametrize(
    ("name", "options", "margin"),
    [
        ("topk", {"share": 0.01}, 0.75),  # a hundred steps: each number was sent about once
        ("randomk", {"share": 0.1}, 0.40),
        ("powersgd", {"rank": 4}, 0.05),
    ],
)
def test_relaxed(name: str, options: dict[str, Any], margin: float) -> None:
    assert train(name, **options) < (1 + margin) * dense()
