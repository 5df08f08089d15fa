"""The training loop: fetch, forward, backward, judge, update, log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol

from yunlu.training.attempt import StopRequestedError
from yunlu.training.batch_schedule import adapt_batch_size
from yunlu.training.guard import StepVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.engine import Engine
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import Batch


@dataclass(slots=True)
class Step:
    """Result of one step."""

    loss: float
    norm: float
    """Norm of the gradient, before clipping."""
    verdict: StepVerdict
    is_applied: bool
    """Whether the weights were changed."""
    items: int = 0
    tokens: int = 0
    padding: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    """Time spent waiting for other workers."""
    samples: int = 0
    digest: int = 0
    """Of the samples it took: see ``StepTotals``."""


class LoopCallbacks(Protocol):
    """Callbacks around every step: logging, evaluation, checkpoints, rollback, stopping."""

    def before_step(self) -> StepRequest:
        """The request to the other workers before the next step."""
        ...

    def before_first_step(self) -> bool:
        """Do what an earlier attempt left undone; true ends the loop."""
        ...

    def after_step(self, step: Step) -> bool:
        """Process one finished step; true ends the loop."""
        ...

    def after_undone_step(self) -> None:
        """A stop request ended a step halfway: it was undone, and ends the loop."""
        ...


def run(engine: Engine, callbacks: LoopCallbacks) -> StepRequest:
    """Train until the last step, or until a callback stops it, or until a worker requests a stop."""
    for part in engine.wrapped.parts:
        part.train()
    engine.begin()
    if callbacks.before_first_step():
        return ""
    adapt_batch_size(engine)
    batches = engine.batches()
    while True:
        started_at = perf_counter()
        micros = next(batches, None)
        if micros is None:
            return ""
        fetched_at, computed_s = perf_counter(), thread_time()
        totals = engine.sync_step(micros, callbacks.before_step())
        if totals.request:
            return totals.request
        try:
            step = _run_step(engine, micros, totals.items)
        except StopRequestedError:
            callbacks.after_undone_step()
            return ""
        if step is None:  # memory ran out: the same step again, in smaller pieces
            batches = engine.batches()
            continue
        step.items, step.tokens, step.padding = totals.items, totals.tokens, totals.padding
        step.samples, step.digest = totals.samples, totals.digest
        step.data_s = fetched_at - started_at
        step.compute_s = perf_counter() - fetched_at
        if engine.clock is not None:
            engine.clock.split(step, thread_time() - computed_s)
        if callbacks.after_step(step):
            return ""
        if adapt_batch_size(engine) or step.verdict.action == "rollback":
            batches = engine.batches()


def _run_step(engine: Engine, micros: Sequence[Batch], items: int) -> Step | None:
    if engine.guard.is_skipped(engine.steps_done):
        engine.skip_step()
        return Step(math.nan, math.nan, StepVerdict("skip", "passed over"), is_applied=False)
    began_at = engine.begin_compute()
    accumulated = engine.accumulate(micros, items)
    if accumulated is None:
        return None
    engine.end_compute(began_at)
    total, gradient_norm = engine.norm(accumulated)
    loss, norm, verdict = engine.judge(total, gradient_norm)
    is_good = verdict.action == "good"
    is_applied = engine.update(gradient_norm) if is_good else engine.discard_step()
    return Step(loss, norm, verdict, is_applied)
