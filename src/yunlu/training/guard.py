"""The stability guard: which steps are bad, and what to do about them. No torch, no clock.

Steps count from 0 here, as in the order of the data.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import TrainingError

if TYPE_CHECKING:
    from yunlu.spec.train import GuardSpec

WINDOW = 256
"""Good losses that a loss is compared with."""
FEWEST = 50
RATIO = 0.5
"""A spike also exceeds the median by this share of it: smooth losses have tiny deviations."""
RECORD = 5.0
"""And by this multiple of the highest recent excess: some losses have long tails."""
WIDENING = 4
"""Factor by which each rollback skips more of the steps before the bad ones."""

Reason = Literal["", "not finite", "spike", "passed over", "overflow"]


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The guard's decision on a step."""

    action: Literal["good", "skip", "rollback", "fail"]
    reason: Reason = ""
    no_later_than: int = 0
    """For ``rollback``: later checkpoints may already be damaged."""


_GOOD = StepVerdict("good")


class Guard:
    """Judges each step by its loss and gradient norm, before the update is applied.

    A bad step is skipped. More of them in a row than the job allows roll the run back to a
    checkpoint; the bad steps and some before them are then skipped, since the cause precedes the
    symptom (Chowdhery et al. 2022, section 5.1). Only a loss or gradient that is not finite can
    end a run; spikes that come again after a rollback are accepted as the new level.
    """

    def __init__(self, spec: GuardSpec) -> None:
        self._spec = spec
        self._recent: deque[tuple[int, float]] = deque()
        self._peaks: deque[tuple[int, float]] = deque()
        """Recent losses that no later one reaches: the first is the highest."""
        self._streak: list[tuple[int, float]] = []
        """Bad steps in a row; the loss of one that was not finite is NaN."""
        self._bad: set[int] = set()
        self._rollbacks = 0
        self._spiked_at: int | None = None

    @property
    def bad_steps(self) -> frozenset[int]:
        """Steps to skip when they come again."""
        return frozenset(self._bad)

    def is_skipped(self, step: int) -> bool:
        """Whether to skip a step that was bad before."""
        return step in self._bad

    @property
    def is_in_doubt(self) -> bool:
        """Whether the newest steps were bad: a checkpoint now might be damaged."""
        return bool(self._streak)

    def judge(self, step: int, loss: float, norm: float, allow_overflow: bool) -> StepVerdict:
        """Judge one step; ``allow_overflow`` where a loss scaler handles infinite gradients."""
        if not (math.isfinite(loss) and (allow_overflow or math.isfinite(norm))):
            return self._refuse(step, loss, "not finite")
        if self._is_spike(loss):
            return self._refuse(step, loss, "spike")
        # A spike that passed enters the statistics: long tails are not skipped for ever.
        for spike in self._streak:
            if math.isfinite(spike[1]):
                self._remember(*spike)
        self._streak.clear()
        self._remember(step, loss)
        return _GOOD

    def rolled_back(self, to_step: int) -> None:
        """The run was rolled back to ``to_step`` steps: drop the losses after them."""
        known = [(step, loss) for step, loss in self._recent if step < to_step]
        self._forget()
        for step, loss in known:
            self._remember(step, loss)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {
            "recent": [list(entry) for entry in self._recent],
            # JSON has no NaN.
            "streak": [
                [step, loss if math.isfinite(loss) else None] for step, loss in self._streak
            ],
            "bad_steps": sorted(self._bad),
            "rollbacks": self._rollbacks,
            "spiked_at": self._spiked_at,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._forget()
        for step, loss in state["recent"]:
            self._remember(step, loss)
        self._streak = [
            (step, math.nan if loss is None else loss) for step, loss in state["streak"]
        ]
        self._bad = set(state["bad_steps"])
        self._rollbacks, self._spiked_at = state["rollbacks"], state["spiked_at"]

    def _is_spike(self, loss: float) -> bool:
        if self._spec.spikes is None or len(self._recent) < FEWEST:
            return False
        highest = self._peaks[0][1]
        if loss <= highest:  # nearly always: the usual step costs nothing more
            return False
        losses = [recent for _, recent in self._recent]
        middle = median(losses)
        excess = loss - middle
        if excess <= max(RATIO * abs(middle), RECORD * (highest - middle)):
            return False
        # 1.4826 makes the median deviation of normal noise its standard deviation.
        deviation = 1.4826 * median([abs(recent - middle) for recent in losses])
        return excess > self._spec.spikes * deviation

    def _refuse(self, step: int, loss: float, reason: Reason) -> StepVerdict:
        self._streak.append((step, loss if reason == "spike" else math.nan))
        self._bad.add(step)
        if len(self._streak) <= self._spec.skips:
            return StepVerdict("skip", reason)
        only_spikes = all(math.isfinite(bad) for _, bad in self._streak)
        spent = self._rollbacks >= self._spec.rollbacks
        if only_spikes and (spent or self._spiked_here_before()):
            self._bad.discard(step)
            self._forget()
            self._remember(step, loss)
            return _GOOD
        if spent:
            return StepVerdict("fail", reason)
        self._rollbacks += 1
        self._spiked_at = step if only_spikes else None
        return StepVerdict("rollback", reason, self._skip_before(self._streak[0][0]))

    def _spiked_here_before(self) -> bool:
        return self._spiked_at is not None and self._streak[0][0] <= self._spiked_at + WINDOW

    def _skip_before(self, step: int) -> int:
        """Skip some steps before the bad ones, more each time; returns the first of them."""
        while step - 1 in self._bad:
            step -= 1
        reach = len(self._streak) * WIDENING ** (self._rollbacks - 1)
        first = max(step - reach, 0)
        self._bad.update(range(first, step))
        return first

    def _remember(self, step: int, loss: float) -> None:
        self._recent.append((step, loss))
        if len(self._recent) > WINDOW and self._recent.popleft() == self._peaks[0]:
            self._peaks.popleft()
        while self._peaks and self._peaks[-1][1] <= loss:
            self._peaks.pop()
        self._peaks.append((step, loss))

    def _forget(self) -> None:
        self._recent.clear()
        self._peaks.clear()
        self._streak.clear()


def diverged(step: int, loss: float, norm: float, lr: float) -> TrainingError:
    """The error that ends a run; ``step`` as the log counts it, from 1."""
    what = "gradient" if math.isfinite(loss) else "loss"
    return TrainingError(
        f"The {what} is not finite at step {step} "
        f"(loss {loss}, gradient norm {norm}, learning rate {lr:g}).",
        hint="Lower train.optimizer.lr, lengthen train.schedule.warmup, tighten train.clip.norm, "
        "or check the data for NaN. Earlier checkpoints, if any, are kept.",
    )
