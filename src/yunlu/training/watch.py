"""What happens around the steps: evaluation, best-keeping, early stopping, checkpoints, stopping."""

from __future__ import annotations

import math
import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any

from yunlu.core.metrics import lower_is_better
from yunlu.core.rundir import EventKind
from yunlu.core.states import RunState
from yunlu.training.checkpoint.store import CheckpointStore
from yunlu.training.evaluate import Score, evaluate
from yunlu.training.metric_log import MetricLog

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.core.rundir import RunDir
    from yunlu.training.checkpoint.files import Entry
    from yunlu.training.engine import Engine
    from yunlu.training.trackers.open import TrackerThread


class StopRequest:
    """Set by a signal, read at step boundaries."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self, *_: Any) -> None:
        """Ask the loop to end at the next step boundary; usable as a signal's reaction."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether anyone asked."""
        return self._event.is_set()


class Best:
    """The best evaluation so far by one metric, and how long ago it was."""

    def __init__(self, metric: str, *, min_delta: float = 0.0, ties_by_loss: bool = False) -> None:
        self.metric = metric
        self.lower_is_better = lower_is_better(metric)
        self._min_delta = min_delta
        self._ties_by_loss = ties_by_loss
        self._value: float | None = None
        self._loss = math.inf
        self.waited = 0

    def observe(self, metrics: dict[str, float]) -> bool:
        """Take one evaluation; true if it is better than all before."""
        better = self._is_better(metrics[self.metric], metrics["loss"])
        if better:
            self._value, self._loss, self.waited = metrics[self.metric], metrics["loss"], 0
        else:
            self.waited += 1
        return better

    def _is_better(self, value: float, loss: float) -> bool:
        if not math.isfinite(value) or self._value is None:
            return math.isfinite(value)
        if value == self._value:  # accuracies tie often: the surer model is the better one
            return self._ties_by_loss and loss < self._loss
        gain = self._value - value if self.lower_is_better else value - self._value
        return gain > self._min_delta

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        loss = self._loss if math.isfinite(self._loss) else None
        return {"value": self._value, "loss": loss, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._value, self.waited = state["value"], state["waited"]
        self._loss = math.inf if state["loss"] is None else state["loss"]


class TrainingWatch:
    """Looks on after every step; everything here is between steps, nothing inside them."""

    def __init__(
        self,
        engine: Engine,
        run: RunDir,
        *,
        trackers: TrackerThread,
        stop: StopRequest,
    ) -> None:
        self._engine, self._run, self._trackers, self._stop = engine, run, trackers, stop
        train, patience = engine.job.train, engine.job.train.early_stopping
        self._best = Best(engine.plan.best_metric, ties_by_loss=True)
        self._patience = patience
        self._improvement = Best(
            engine.plan.stopping_metric, min_delta=patience.min_delta if patience else 0.0
        )
        self.log = MetricLog(
            run.metrics,
            device=engine.device,
            allow_overflow=engine.precision.skips_overflow,
            forward=lambda values, step: trackers.log(values, step=step),
        )
        self.checkpoints = CheckpointStore(
            run.checkpoints,
            keep_last=train.checkpoint.keep_last,
            keep_best=train.checkpoint.keep_best,
            metric=self._best.metric,
            lower_is_better=self._best.lower_is_better,
            saved=self._announce,
        )
        self._stall_s = 0.0
        self.stopped_early = False

    @property
    def samples_done(self) -> int:
        """Samples consumed over all lives."""
        return self._engine.order.samples_before(self._engine.steps_done)

    def resume(self) -> int | None:
        """Continue from the newest good checkpoint, if there is one; returns its step."""
        snapshot = self.checkpoints.newest_good(self._run.warn)
        if snapshot is None:
            return None
        kept = self._engine.restore(snapshot)
        self._best.restore(kept["best"])
        self._improvement.restore(kept["improvement"])
        self.stopped_early = kept["stopped_early"]
        return snapshot.step

    def after_step(
        self, *, loss: Tensor, norm: Tensor, lr: float, items: int, data_s: float, compute_s: float
    ) -> bool:
        """Log the step, then evaluate, save and stop where that is due."""
        engine, plan = self._engine, self._engine.plan
        step = engine.steps_done
        self.log.add(
            {
                "step": step,
                "epoch": step / plan.steps_per_epoch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "samples": engine.order.samples_before(step),
                "items": items,
                "data_s": data_s,
                "compute_s": compute_s,
                "communication_s": 0.0,
                "evaluate_s": 0.0,
                "checkpoint_s": 0.0,
            }
        )
        last = step == plan.steps
        metrics, improved = self._evaluate(last=last)
        stopping = self._stop.is_set and not last
        if stopping:
            self._run.emit(EventKind.STATE, state=RunState.STOPPING, reason="asked to stop")
        due = step % plan.checkpoint_every == 0
        ending = last or stopping or self.stopped_early
        if due or ending or (improved and engine.job.train.checkpoint.keep_best):
            self._save(metrics)
        self.log.flush_if_due()
        return ending

    def _evaluate(self, *, last: bool) -> tuple[dict[str, float], bool]:
        engine, every = self._engine, self._engine.plan.evaluate_every
        if not every or engine.splits.validation is None:
            return {}, False
        if engine.steps_done % every and not last:
            return {}, False
        self.log.check()  # a loss that is not finite ends the run here, before it is scored
        score = self.score("validation")
        self.log.charge("evaluate_s", score.seconds)
        improved = self._best.observe(score.metrics)
        better = self._improvement.observe(score.metrics)
        if engine.job.train.schedule.name == "plateau":
            engine.plateau.observe(improved=better)
        patience = self._patience
        self.stopped_early = patience is not None and self._improvement.waited >= patience.patience
        return score.metrics, improved

    def score(self, split: str, *, step: int | None = None) -> Score:
        """Evaluate the weights worth keeping on a split, and tell everyone.

        ``step`` is the one the weights are from, where that is not the newest.
        """
        engine = self._engine
        step = engine.steps_done if step is None else step
        samples = getattr(engine.splits, split)
        score = evaluate(
            engine.task,
            engine.best_view,
            samples,
            precision=engine.precision,
            device=engine.device,
            micro_batch=engine.plan.micro_batch,
            workers=engine.plan.workers,
        )
        self._run.emit(EventKind.EVALUATION, **score.as_event(split=split, step=step))
        named = {f"{split}/{name}": value for name, value in score.metrics.items()}
        self._trackers.log(named, step=step)
        return score

    def _save(self, metrics: dict[str, float]) -> None:
        self.log.check()
        started_at = perf_counter()
        extra = {
            "best": self._best.state(),
            "improvement": self._improvement.state(),
            "stopped_early": self.stopped_early,
        }
        snapshot = self._engine.snapshot(metrics=metrics, extra=extra)
        self.checkpoints.wait()  # at most one save is under way
        self._stall_s = perf_counter() - started_at
        self.log.charge("checkpoint_s", self._stall_s)
        # Logged first: a life that goes on from this checkpoint does not repeat these steps.
        self.log.flush()
        self.checkpoints.save(snapshot)

    def _announce(self, entry: Entry, seconds: float) -> None:
        self._run.emit(
            EventKind.CHECKPOINT,
            step=entry.step,
            path=str(entry.path.relative_to(self._run.path)),
            bytes=entry.bytes,
            seconds=seconds,
            stalled_s=self._stall_s,
            metrics=entry.metrics,
        )
