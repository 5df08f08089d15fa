"""A model built to break in FP16: fixed FP16 does, the policy trains it to the loss of FP32.

One branch computes beyond 65504 between its layers; another learns from a loss so small that its
gradients vanish at any scale the rest of the model can bear. The rest, most of the parameters, is
ordinary.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from tests.training_device import DEVICE, gradient_norm
from yunlu.training.precision import Precision, PrecisionChange

STEPS = 80
FAINT = 1e-14


class Loud(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * 1e3) * 1e3) * 1e-6


class Breaking(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(3)
        )
        self.loud = Loud(width)
        self.last = nn.Linear(width, 4)
        self.faint = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden + self.loud(hidden)), self.faint(x)


@dataclass
class Training:
    """A hand-written loop around ``Precision``, that can be stopped and resumed."""

    name: str
    adapt: bool = False
    losses: list[float] = field(default_factory=list)
    faint_losses: list[float] = field(default_factory=list)
    moves: list[tuple[int, PrecisionChange]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Breaking()
        # A tiny epsilon: Adam then follows gradients of any size.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3, eps=1e-30)
        self.average = AveragedModel(self.model)
        self.precision = Precision(self.name, DEVICE, adapt=self.adapt)
        self.precision.attach(self.model, self.average.module)
        made = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, 8, generator=made)
        self.labels = 2 * (self.inputs[:, 0] > 0).long() + (self.inputs[:, 1] > 0).long()
        self.numbers = self.inputs[:, 2:3] - self.inputs[:, 3:4]

    def run(self, steps: int) -> Training:
        for step in range(len(self.losses) + 1, steps + 1):
            for part in (slice(0, 32), slice(32, 64)):
                with self.precision.forward():
                    loss, faint = self.measure(part)
                self.precision.backward((loss + FAINT * faint) / 2)
            self.precision.unscale(self.optimizer)
            self.precision.note_norm(gradient_norm(self.model))
            if self.precision.step(self.optimizer):
                self.average.update_parameters(self.model)
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())
            self.faint_losses.append(faint.item())
            moves = self.precision.observe(step=step, loss=loss.item())
            self.moves += [(step, move) for move in moves]
        return self

    def measure(self, part: slice) -> tuple[Tensor, Tensor]:
        scores, guesses = self.model(self.inputs[part])
        return (
            functional.cross_entropy(scores.float(), self.labels[part]),
            functional.mse_loss(guesses.float(), self.numbers[part]),
        )


def test_the_policy_reaches_the_fp32_loss_where_fixed_fp16_breaks() -> None:
    exact = Training("fp32").run(STEPS)
    assert exact.losses[-1] < 0.1 * exact.losses[0]
    assert exact.faint_losses[-1] < 0.1 * exact.faint_losses[0]

    fixed = Training("fp16").run(12)
    assert all(math.isnan(loss) for loss in fixed.losses)
    assert fixed.precision.skips == 12

    found = Training("fp16", adapt=True).run(STEPS)
    assert found.losses[-1] == pytest.approx(exact.losses[-1], abs=0.02 * exact.losses[0])
    faint_start = exact.faint_losses[0]
    assert found.faint_losses[-1] == pytest.approx(exact.faint_losses[-1], abs=0.02 * faint_start)
    share = found.precision.low_share
    assert share is not None
    assert 0.5 < share < 1
    assert found.precision.skips < 6
    assert {move.module for _, move in found.moves if move.to == "full"} == {
        "loud",
        "loud.down",
        "faint.0",
        "faint.2",
    }
    assert found.moves[-1][1].low_share == share


def test_a_faint_branch_stalls_in_fixed_fp16() -> None:
    fixed = Training("fp16")
    fixed.model.loud.forward = torch.zeros_like  # leaves only the other trouble
    fixed.run(20)
    assert fixed.precision.skips == 0
    assert fixed.losses[-1] < fixed.losses[0]
    assert fixed.faint_losses[-1] == fixed.faint_losses[0]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    """Stopped just after a move, before the look that follows it, and in the calm between looks."""
    whole = Training("fp16", adapt=True).run(20)
    for stop in (1, 3, 12):
        before = Training("fp16", adapt=True).run(stop)
        kept = json.loads(json.dumps(before.precision.state()))
        after = Training("fp16", adapt=True)
        after.model.load_state_dict(before.model.state_dict())
        after.average.load_state_dict(before.average.state_dict())
        after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
        after.precision.restore(kept)
        after.losses, after.faint_losses = list(before.losses), list(before.faint_losses)
        after.moves = list(before.moves)
        after.run(20)
        assert after.moves == whole.moves
        assert after.losses[stop:] == pytest.approx(whole.losses[stop:], rel=0, abs=0, nan_ok=True)
        assert after.precision.state() == whole.precision.state()
        for one, other in ((after.model, whole.model), (after.average, whole.average)):
            torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_an_average_is_evaluated_where_the_model_is_and_the_weights_are_plain() -> None:
    training = Training("fp16", adapt=True).run(8)
    assert training.precision.low_share is not None
    assert training.precision.low_share < 1
    for model in (training.model, training.average.module):
        with torch.no_grad(), training.precision.forward():
            scores, _ = model(training.inputs)
        assert scores.isfinite().all()
        assert list(model.state_dict()) == list(Breaking().state_dict())
        assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    training.precision.detach()
    for module in training.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
