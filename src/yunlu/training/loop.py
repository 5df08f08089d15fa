"""The inner loop: fetch, forward, backward, judge, update, log. Nothing else lives here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from yunlu.training.guard import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.engine import Engine
    from yunlu.training.tasks.task import Batch


@dataclass(slots=True)
class Step:
    """What one step came to."""

    loss: float
    norm: float
    """Of the gradient, before clipping."""
    verdict: Verdict
    is_applied: bool
    """Whether the weights were changed."""
    items: int = 0
    tokens: int = 0
    padding: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0


class Watch(Protocol):
    """What looks on after every step: the log, evaluation, checkpoints, going back, stopping."""

    def after_step(self, step: Step) -> bool:
        """Take one finished step; true ends the loop."""
        ...


def run(engine: Engine, watch: Watch) -> None:
    """Train until the plan's last step, or until the watch says stop."""
    engine.model.train()
    batches = engine.batches()
    while True:
        started_at = perf_counter()
        micros = next(batches, None)
        if micros is None:
            return
        fetched_at = perf_counter()
        step = _take(engine, micros)
        if step is None:  # memory ran out: the same step again, in smaller pieces
            batches = engine.batches()
            continue
        for micro in micros:
            step.items += micro.items
            step.tokens += micro.tokens
            step.padding += micro.padding
        step.data_s = fetched_at - started_at
        step.compute_s = perf_counter() - fetched_at
        if watch.after_step(step):
            return
        if step.verdict.action == "rollback":
            batches = engine.batches()


def _take(engine: Engine, micros: Sequence[Batch]) -> Step | None:
    if engine.guard.passes_over(engine.steps_done):
        engine.pass_over()
        return Step(math.nan, math.nan, Verdict("skip", "passed over"), is_applied=False)
    accumulated = engine.accumulate(micros)
    if accumulated is None:
        return None
    gradient_norm = engine.norm()
    loss, norm, verdict = engine.judge(accumulated, gradient_norm)
    is_good = verdict.action == "good"
    is_applied = engine.update(gradient_norm) if is_good else engine.leave_out()
    return Step(loss, norm, verdict, is_applied)
