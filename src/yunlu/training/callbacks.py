"""Callbacks between steps: logging, evaluation, early stopping, checkpoints, rollback, stopping."""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import TrainingError, did_you_mean
from yunlu.runs.events import (
    CheckpointSaved,
    PrecisionChanged,
    RolledBack,
    StateChanged,
    StepSkipped,
)
from yunlu.runs.metric_writer import MetricWriter
from yunlu.runs.run_store import Area, Document, read_number
from yunlu.runs.states import RunState
from yunlu.spec.search import lower_is_better
from yunlu.training.attempt import StopRequestedError
from yunlu.training.checkpoint.store import CheckpointStore
from yunlu.training.device import max_memory_bytes, random_kept
from yunlu.training.evaluate import Score, evaluate
from yunlu.training.guard import diverged
from yunlu.training.hooks.callback import CallbackCaller, StepReport
from yunlu.training.memory.peak import peak_resident_bytes
from yunlu.training.trial_control import open_trial_control

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from yunlu.runs.run_store import RunStore
    from yunlu.training.attempt import StopRequest
    from yunlu.training.checkpoint.files import CheckpointEntry, CheckpointReader
    from yunlu.training.checkpoint.store import SaveGroup
    from yunlu.training.engine import Engine
    from yunlu.training.loop import Step
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.trackers.tracker import TrackerThread
    from yunlu.training.trial_control import PruneDecision


_FLUSH_EVERY_S = 0.5
_FLUSH_AT = 256
_TRACKED_PER_FLUSH = 10
_TRACKED = (
    *("compute_s", "data_s", "epoch", "grad_norm", "loss", "loss_scale"),
    *("low_share", "lr", "memory_bytes", "noise_scale"),
)


class MetricLog:
    """Appends one record per step to the metrics of the run (keys: ``METRIC_KEYS``)."""

    def __init__(
        self,
        run: RunStore,
        *,
        device: torch.device,
        attempt: int,
        forward: Callable[[dict[str, float], int], None],
    ) -> None:
        self._run = run
        self._writer = MetricWriter(run)
        self._device = device
        self._attempt = attempt
        self._forward = forward
        self._pending: list[dict[str, Any]] = []
        self._deferred: dict[str, float] = {}
        self._flushed_at = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one step."""
        record["at"], record["attempt"] = time.time(), self._attempt
        for field, seconds in self._deferred.items():
            record[field] += seconds
        self._deferred.clear()
        self._pending.append(record)

    def charge(self, field: str, seconds: float) -> None:
        """Charge seconds spent after the last step to its record."""
        if self._pending:
            self._pending[-1][field] += seconds
        else:  # already written, or skipped: charge the next record
            self._deferred[field] = self._deferred.get(field, 0.0) + seconds

    def flush_if_due(self) -> None:
        """Write pending records a few times a second."""
        due = time.monotonic() - self._flushed_at >= _FLUSH_EVERY_S
        if due or len(self._pending) >= _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Write pending records."""
        records, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not records:
            return
        memory = self._memory_bytes()
        for record in records:
            record["memory_bytes"] = memory
        self._writer.append(records)
        # Trackers get a sample of the points; the log above has them all.
        stride = -(-len(records) // _TRACKED_PER_FLUSH)
        for record in records[::-stride][::-1]:
            self._forward(_for_trackers(record), record["step"])

    def close(self) -> None:
        """Write pending records, and pack what was written, if it is much."""
        self.flush()
        self._writer.close()

    def _memory_bytes(self) -> int:
        peak = max_memory_bytes(self._device)
        return peak_resident_bytes() if peak is None else peak


def _for_trackers(record: dict[str, Any]) -> dict[str, float]:
    return {f"train/{name}": float(record[name]) for name in _TRACKED if name in record}


class BestCheckpoint:
    """The best evaluation so far by one metric, and the evaluations since."""

    def __init__(self, metric: str, *, min_delta: float = 0.0, ties_by_loss: bool = False) -> None:
        self.metric = metric
        self.lower_is_better = lower_is_better(metric)
        self._min_delta = min_delta
        self._ties_by_loss = ties_by_loss
        self._value: float | None = None
        self._loss = math.inf
        self.waited = 0

    def observe(self, metrics: dict[str, float]) -> bool:
        """Record one evaluation; true if it is the best so far."""
        if self.metric not in metrics:  # a user's own function may return other names each time
            raise TrainingError(
                f"The job goes by the metric {self.metric!r}, which this evaluation did not give.",
                hint=did_you_mean(self.metric, metrics),
            )
        better = self._is_better(metrics[self.metric], metrics["loss"])
        if better:
            self._value, self._loss, self.waited = metrics[self.metric], metrics["loss"], 0
        else:
            self.waited += 1
        return better

    def _is_better(self, value: float, loss: float) -> bool:
        if not math.isfinite(value) or self._value is None:
            return math.isfinite(value)
        if value == self._value:  # accuracies tie often: then the lower loss wins
            return self._ties_by_loss and loss < self._loss
        gain = self._value - value if self.lower_is_better else value - self._value
        return gain > self._min_delta

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        loss = self._loss if math.isfinite(self._loss) else None
        return {"value": self._value, "loss": loss, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._value, self.waited = state["value"], state["waited"]
        self._loss = math.inf if state["loss"] is None else state["loss"]


class TrainingCallbacks:
    """Runs after every step: logs, evaluates, saves, rolls back, stops."""

    def __init__(
        self,
        engine: Engine,
        run: RunStore,
        *,
        trackers: TrackerThread,
        stop: StopRequest,
        attempt: int,
        hooks: CallbackCaller | None = None,
        group: SaveGroup | None = None,
        log: MetricLog | None = None,
        interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``group`` and ``log`` are given for a worker of a worker group.

        ``interruptible``: context of work that a stop request may end halfway.
        """
        self._engine, self._run, self._trackers, self._stop = engine, run, trackers, stop
        self.hooks = hooks or CallbackCaller()
        """The user's own callbacks; none on workers that do not lead."""
        self._interruptible = engine.interruptible = interruptible
        self._owes_evaluation = False
        """Whether a stop ended the evaluation after the newest step."""
        train, patience = engine.job.train, engine.job.train.early_stopping
        self._best = BestCheckpoint(engine.plan.best_metric, ties_by_loss=True)
        self._patience = patience
        self._improvement = BestCheckpoint(
            engine.plan.stopping_metric, min_delta=patience.min_delta if patience else 0.0
        )
        self.log = log or MetricLog(
            run,
            device=engine.device,
            attempt=attempt,
            forward=lambda values, step: trackers.log(values, step=step),
        )
        checkpoint = train.checkpoint
        self.checkpoints = CheckpointStore(
            run.location(Area.CHECKPOINTS)
            if checkpoint.url is None
            else f"{checkpoint.url.rstrip('/')}/{run.id}",
            options=checkpoint.options,
            keep_last=train.checkpoint.keep_last,
            keep_best=train.checkpoint.keep_best,
            metric=self._best.metric,
            lower_is_better=self._best.lower_is_better,
            saved=self._announce,
            group=group,
        )
        engine.before_change = self.checkpoints.finish_copy
        engine.requested_batch = self._read_batch
        self._stall_s = 0.0
        self.stopped_early = False
        self.rung = 0
        """Evaluations on the validation data over all attempts."""
        self._evaluated_at = self._saved_at = -1
        self._trial_control = open_trial_control(run)
        self.decision: PruneDecision | None = None
        """Why a trial ended before its last step, if it did."""

    @property
    def samples_done(self) -> int:
        """Samples consumed over all attempts."""
        return self._engine.order.samples_before(self._engine.steps_done)

    @property
    def is_complete(self) -> bool:
        """Whether the run has made its last step."""
        engine = self._engine
        is_through = self.stopped_early or engine.steps_done >= engine.batch_schedule.steps
        return is_through and not self._owes_evaluation

    def begin_phase(self, phase: str) -> None:
        """Begin a long phase that is not a step; nobody watches over a single worker."""

    def resume(self) -> int | None:
        """Restore the newest valid checkpoint, if there is one; returns its step."""
        reader = self.checkpoints.open_newest(self._run.warn)
        if reader is None:
            return None
        own_settings = [_group_settings(group) for group in self._engine.optimizer.param_groups]
        self._restore(reader)
        if self._trial_control is not None and self._trial_control.is_copy:
            for group, settings in zip(
                self._engine.optimizer.param_groups, own_settings, strict=True
            ):
                group.update(settings)
        return self._engine.steps_done

    def _restore(self, reader: CheckpointReader) -> None:
        with closing(reader):
            self.restore(self._engine.state.read(reader))

    def state(self) -> dict[str, Any]:
        """State for a checkpoint or a joining worker, as JSON."""
        return {
            "best": self._best.state(),
            "improvement": self._improvement.state(),
            "stopped_early": self.stopped_early,
            "rung": self.rung,
            "owes_evaluation": self._owes_evaluation,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self._best.restore(state["best"])
        self._improvement.restore(state["improvement"])
        self.stopped_early = state["stopped_early"]
        # Absent in checkpoints of earlier versions.
        self.rung = state.get("rung", 0)
        self._owes_evaluation = state.get("owes_evaluation", False)

    def _read_batch(self) -> int | None:
        """The batch size requested while the run goes on."""
        try:
            target = read_number(self._run, Document.TARGET_BATCH)
        except OSError:
            return None
        return None if target is None else max(target, 1)

    def before_step(self) -> StepRequest:
        """Request what a callback asked for: there are no other workers."""
        return self.hooks.request

    def end_on_request(self, request: StepRequest) -> None:
        """End before the next step, because a callback asked; by all workers after the same step."""
        if self.hooks.reason:
            self._run.emit(StateChanged(state=RunState.STOPPING, reason=self.hooks.reason))
        metrics: dict[str, float] = {}
        if request == "finish":
            if self._evaluated_at != self._engine.steps_done:
                metrics, _ = self._evaluate(last=True)
            self.stopped_early = True
        if self._saved_at != self._engine.steps_done:
            self._save(metrics)
        self.checkpoints.wait()
        self.log.flush()

    def before_first_step(self) -> bool:
        """Evaluate where the last attempt was stopped while it did; true ends the loop."""
        return self._owes_evaluation and self._end_step()

    def after_undone_step(self) -> None:
        """Save the state before the step, unless there is none."""
        self._report_stopping()
        if self._engine.steps_done:
            self._save({})

    def _report_stopping(self) -> None:
        self._run.emit(StateChanged(state=RunState.STOPPING, reason="stop requested"))

    def after_step(self, step: Step) -> bool:
        """Log the step, then evaluate, save and stop where due."""
        engine = self._engine
        self._log(step)
        self.hooks.call_checkpoints()
        if self.hooks.has_step_hooks:
            self.hooks.call_step(self._describe(step))
        for change in engine.precision.observe(step=engine.steps_done, loss=step.loss):
            self._run.emit(PrecisionChanged(step=engine.steps_done, **asdict(change)))
        if step.verdict.action == "rollback":
            self._roll_back(step)
            return False
        return self._end_step()

    def _end_step(self) -> bool:
        """Evaluate, save and stop where due; true ends the loop."""
        engine = self._engine
        done = engine.steps_done
        last = done == engine.batch_schedule.steps
        try:
            metrics, improved = self._evaluate(last=last)
        except StopRequestedError:
            # Of the whole split or not at all; the next attempt makes up for it before anything else.
            self._owes_evaluation = True
            self._report_stopping()
            self._save({})
            return True
        self._owes_evaluation = False
        if not last and not self.stopped_early:
            self.decision = self._read_decision(is_rung=bool(metrics))
        if self.decision is not None:
            self._run.emit(StateChanged(state=RunState.STOPPING, reason=self.decision.reason))
            if self.decision.kind == "prune":  # a pruned trial is not resumed
                self.checkpoints.abandon()
                return True
        stopping = self._stop.is_set and not last
        if stopping and self.decision is None:
            self._report_stopping()
        by_epoch = engine.job.train.checkpoint.every == "epoch"
        is_epoch_end = by_epoch and engine.order.epoch_at(done).is_integer()
        due = is_epoch_end or (not by_epoch and done % engine.plan.checkpoint_every == 0)
        due = due and not self._is_in_doubt()
        ending = last or stopping or self.stopped_early or self.decision is not None
        is_shared = bool(metrics) and self._trial_control is not None and self._trial_control.saves
        is_better = improved and bool(engine.job.train.checkpoint.keep_best)
        if due or ending or is_shared or is_better:
            self._save(metrics)
        self.log.flush_if_due()
        return ending

    def _read_decision(self, *, is_rung: bool) -> PruneDecision | None:
        """The decision of the study, if the run is a trial."""
        if self._trial_control is None:
            return None
        if not is_rung:
            return self._trial_control.peek(self.rung)
        return self._trial_control.ask(self.rung, keep_waiting=lambda: not self._stop.is_set)

    def _is_in_doubt(self) -> bool:
        return self._engine.guard.is_in_doubt

    def _log(self, step: Step) -> None:
        engine, done = self._engine, self._engine.steps_done
        if not step.is_applied:
            self._report_skipped(step)
        if not math.isfinite(step.loss + step.norm):
            return  # reported as an event; a record holds finite numbers only
        record: dict[str, Any] = {
            "step": done,
            "epoch": engine.order.epoch_at(done),
            "loss": step.loss,
            "lr": engine.lr,
            "grad_norm": step.norm,
            "samples": engine.order.samples_before(done),
            "items": step.items,
            "data_s": step.data_s,
            "compute_s": step.compute_s,
            "communication_s": step.wait_s,
            "evaluate_s": 0.0,
            "checkpoint_s": 0.0,
        }
        if step.tokens:
            record["tokens"], record["padding"] = step.tokens, step.padding
        record.update(engine.health())
        self.log.add(record)

    def _describe(self, step: Step) -> StepReport:
        engine, done = self._engine, self._engine.steps_done
        return StepReport(
            step=done,
            epoch=engine.order.epoch_at(done),
            loss=step.loss,
            lr=engine.lr,
            grad_norm=step.norm,
            samples=engine.order.samples_before(done),
            seconds=step.data_s + step.compute_s + step.wait_s,
            is_applied=step.is_applied,
        )

    def _report_skipped(self, step: Step) -> None:
        """Report a skipped step; end the run if the guard gives up."""
        done, verdict = self._engine.steps_done, step.verdict
        self.log.flush()
        self._run.emit(
            StepSkipped(
                step=done,
                reason=verdict.reason or "overflow",
                loss=step.loss,
                norm=step.norm,
            )
        )
        if verdict.action == "fail":
            raise diverged(done, step.loss, step.norm, self._engine.lr)

    def _roll_back(self, step: Step) -> None:
        """Restore a checkpoint from before the bad steps, and skip them."""
        engine = self._engine
        at, guard = engine.steps_done, engine.guard.state()
        self.checkpoints.wait()
        open_newest, last = self.checkpoints.open_newest, step.verdict.no_later_than
        # A later checkpoint is still better than none.
        reader = open_newest(self._run.warn, not_after=last) or open_newest(self._run.warn)
        if reader is None:  # nothing to go back to
            raise diverged(at, step.loss, step.norm, engine.lr)
        self.checkpoints.forget_after(reader.step)
        self._restore(reader)
        # The guard keeps its state: the bad steps must be known after the rollback.
        engine.guard.restore(guard)
        engine.guard.rolled_back(engine.steps_done)
        skipping = tuple(sorted(engine.guard.bad_steps))
        to_step = engine.steps_done
        self._run.emit(RolledBack(step=at, to_step=to_step, skipping=skipping))

    def _evaluate(self, *, last: bool) -> tuple[dict[str, float], bool]:
        engine, every = self._engine, self._engine.plan.evaluate_every
        if not every or engine.splits.validation is None:
            return {}, False
        epoch = engine.order.epoch_at(engine.steps_done)
        by_epoch = engine.job.train.evaluate == "epoch"
        due = epoch.is_integer() if by_epoch else engine.steps_done % every == 0
        if not due and not last:
            return {}, False
        score = self.score("validation")
        self.rung += 1
        self._evaluated_at = engine.steps_done
        self.log.charge("evaluate_s", score.seconds)
        improved = self._best.observe(score.metrics)
        better = self._improvement.observe(score.metrics)
        if engine.job.train.schedule.name == "plateau":
            engine.plateau.observe(improved=better)
        patience = self._patience
        self.stopped_early = patience is not None and self._improvement.waited >= patience.patience
        return score.metrics, improved

    def score(self, split: str, *, step: int | None = None) -> Score:
        """Evaluate the exported weights on a split; emit an event and log to the trackers.

        ``step``: the step of the weights, if not the newest.
        """
        engine = self._engine
        step = engine.steps_done if step is None else step
        samples = getattr(engine.splits, split)
        with random_kept(), self._interruptible():
            score = evaluate(
                engine.task,
                engine.best_view,
                samples,
                precision=engine.precision,
                device=engine.device,
                micro_batch=engine.micro_batch,
                workers=engine.plan.workers,
                metrics=engine.metrics,
            )
        rung = self.rung + 1 if split == "validation" else None
        event = score.as_event(split=split, step=step, rung=rung)
        self._run.emit(event)
        self.hooks.call_evaluation(event)
        metrics = {f"{split}/{name}": value for name, value in score.metrics.items()}
        self._trackers.log(metrics, step=step)
        return score

    def take_best(self) -> tuple[int, dict[str, dict[str, float]]]:
        """Restore the best weights, if kept; returns their step, and scores by split."""
        engine = self._engine
        keeps = engine.job.train.checkpoint.keep_best
        reader = self.checkpoints.open_best(self._run.warn) if keeps else None
        if reader is None:
            return engine.steps_done, {}
        with closing(reader):
            engine.state.read_weights(reader)
        return reader.step, {"validation": reader.metrics}

    def save_and_wait(self) -> None:
        """Save a checkpoint, and wait until it is on disk."""
        self._save({})
        self.checkpoints.wait()

    def _save(self, metrics: dict[str, float]) -> None:
        started_at, self._saved_at = perf_counter(), self._engine.steps_done
        # Logged first: an attempt that resumes from this checkpoint does not repeat these steps.
        self.log.flush()
        state = self._engine.state
        self.checkpoints.save(
            state.snapshot(metrics=metrics, extra=self.state()),
            # Copied during the next forward and backward pass, unless gradient release changes weights there.
            defer=self._engine.release is None,
            moving=state.moving(),
        )
        self._stall_s = perf_counter() - started_at
        self.log.charge("checkpoint_s", self._stall_s)

    def _announce(self, entry: CheckpointEntry, seconds: float) -> None:
        event = CheckpointSaved(
            step=entry.step,
            path=entry.where.removeprefix(f"{self._run.location('')}/"),
            bytes=entry.bytes,
            seconds=seconds,
            stalled_s=self._stall_s,
            metrics=entry.metrics,
        )
        self._run.emit(event)
        self.hooks.note_checkpoint(event)


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a parameter group from the job; its learning rate is set before each step."""
    return {key: value for key, value in group.items() if key not in {"params", "lr"}}
