"""What happens around the steps: evaluation, best-keeping, early stopping, checkpoints, stopping."""

from __future__ import annotations

import math
import threading
from contextlib import closing
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from yunlu.core.metrics import lower_is_better
from yunlu.runs.documents import read_number
from yunlu.runs.events import (
    CheckpointSaved,
    PrecisionChanged,
    RolledBack,
    StateChanged,
    StepSkipped,
)
from yunlu.runs.run_store import Area, Document
from yunlu.runs.states import RunState
from yunlu.training.checkpoint.store import CheckpointStore
from yunlu.training.evaluate import Score, evaluate
from yunlu.training.guard import diverged
from yunlu.training.metric_log import MetricLog
from yunlu.training.trial_control import PruneDecision, open_trial_control

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.training.checkpoint.files import CheckpointEntry
    from yunlu.training.checkpoint.reader import CheckpointReader
    from yunlu.training.checkpoint.save_group import SaveGroup
    from yunlu.training.communication.step_sync import StepRequest
    from yunlu.training.engine import Engine
    from yunlu.training.loop import Step
    from yunlu.training.trackers.registry import TrackerThread


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


class BestCheckpoint:
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


class TrainingCallbacks:
    """Looks on after every step; everything here is between steps, nothing inside them."""

    def __init__(
        self,
        engine: Engine,
        run: RunStore,
        *,
        trackers: TrackerThread,
        stop: StopRequest,
        life: int,
        crew: SaveGroup | None = None,
        log: MetricLog | None = None,
    ) -> None:
        """``crew`` and ``log`` are given to a worker among others."""
        self._engine, self._run, self._trackers, self._stop = engine, run, trackers, stop
        train, patience = engine.job.train, engine.job.train.early_stopping
        self._best = BestCheckpoint(engine.plan.best_metric, ties_by_loss=True)
        self._patience = patience
        self._improvement = BestCheckpoint(
            engine.plan.stopping_metric, min_delta=patience.min_delta if patience else 0.0
        )
        self.log = log or MetricLog(
            run,
            device=engine.device,
            life=life,
            forward=lambda values, step: trackers.log(values, step=step),
        )
        kept = train.checkpoint
        self.checkpoints = CheckpointStore(
            run.location(Area.CHECKPOINTS)
            if kept.url is None
            else f"{kept.url.rstrip('/')}/{run.id}",
            options=kept.options,
            keep_last=train.checkpoint.keep_last,
            keep_best=train.checkpoint.keep_best,
            metric=self._best.metric,
            lower_is_better=self._best.lower_is_better,
            saved=self._announce,
            crew=crew,
        )
        engine.before_change = self.checkpoints.finish_copy
        engine.requested_batch = self._read_batch
        self._stall_s = 0.0
        self.stopped_early = False
        self.rung = 0
        """Evaluations on the validation data over all lives."""
        self._gate = open_trial_control(run)
        self.decision: PruneDecision | None = None
        """Why a trial ended before its last step."""

    @property
    def samples_done(self) -> int:
        """Samples consumed over all lives."""
        return self._engine.order.samples_before(self._engine.steps_done)

    def resume(self) -> int | None:
        """Continue from the newest good checkpoint, if there is one; returns its step."""
        reader = self.checkpoints.open_newest(self._run.warn)
        if reader is None:
            return None
        own = [_guard_settings(group) for group in self._engine.optimizer.param_groups]
        self._restore(reader)
        if self._gate is not None and self._gate.is_copy:
            for group, rules in zip(self._engine.optimizer.param_groups, own, strict=True):
                group.update(rules)
        return self._engine.steps_done

    def _restore(self, reader: CheckpointReader) -> None:
        with closing(reader):
            self.restore(self._engine.state.read(reader))

    def state(self) -> dict[str, Any]:
        """What the watch has to know to go on, as JSON."""
        return {
            "best": self._best.state(),
            "improvement": self._improvement.state(),
            "stopped_early": self.stopped_early,
            "rung": self.rung,
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what another watch knew."""
        self._best.restore(kept["best"])
        self._improvement.restore(kept["improvement"])
        self.stopped_early = kept["stopped_early"]
        self.rung = kept.get("rung", 0)  # those of earlier versions did not count

    def _read_batch(self) -> int | None:
        """The batch that somebody asked for while the run goes on."""
        try:
            target = read_number(self._run, Document.TARGET_BATCH)
        except OSError:
            return None
        return None if target is None else max(target, 1)

    def before_step(self) -> StepRequest:
        """A worker alone asks nobody."""
        return ""

    def after_step(self, step: Step) -> bool:
        """Log the step, then evaluate, save and stop where that is due."""
        engine = self._engine
        self._log(step)
        for move in engine.precision.observe(step=engine.steps_done, loss=step.loss):
            self._run.emit(PrecisionChanged(step=engine.steps_done, **asdict(move)))
        if step.verdict.action == "rollback":
            self._roll_back(step)
            return False
        done = engine.steps_done
        last = done == engine.batch_schedule.steps
        metrics, improved = self._evaluate(last=last)
        if not last and not self.stopped_early:
            self.decision = self._heed_gate(is_rung=bool(metrics))
        if self.decision is not None:
            self._run.emit(StateChanged(state=RunState.STOPPING, reason=self.decision.reason))
            if self.decision.kind == "prune":  # nobody will go on from here
                self.checkpoints.abandon()
                return True
        stopping = self._stop.is_set and not last
        if stopping and self.decision is None:
            self._run.emit(StateChanged(state=RunState.STOPPING, reason="asked to stop"))
        by_epoch = engine.job.train.checkpoint.every == "epoch"
        is_turn = by_epoch and engine.order.epoch_at(done).is_integer()
        due = is_turn or (not by_epoch and done % engine.plan.checkpoint_every == 0)
        due = due and not self._is_in_doubt()
        ending = last or stopping or self.stopped_early or self.decision is not None
        is_shared = bool(metrics) and self._gate is not None and self._gate.saves
        is_better = improved and bool(engine.job.train.checkpoint.keep_best)
        if due or ending or is_shared or is_better:
            self._save(metrics)
        self.log.flush_if_due()
        return ending

    def _heed_gate(self, *, is_rung: bool) -> PruneDecision | None:
        """What the study says, where the run is a trial of one."""
        if self._gate is None:
            return None
        if not is_rung:
            return self._gate.peek(self.rung)
        return self._gate.ask(self.rung, is_wanted=lambda: not self._stop.is_set)

    def _is_in_doubt(self) -> bool:
        return self._engine.guard.is_in_doubt

    def _log(self, step: Step) -> None:
        engine, done = self._engine, self._engine.steps_done
        if not step.is_applied:
            self._tell_left_out(step)
        if not math.isfinite(step.loss + step.norm):
            return  # an event told of it; a record holds numbers only
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

    def _tell_left_out(self, step: Step) -> None:
        """Say why a step changed nothing; end the run where the guard gives up."""
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
        """Go back to a checkpoint from before the trouble, and on past the steps that were bad."""
        engine = self._engine
        at, guard = engine.steps_done, engine.guard.state()
        self.checkpoints.wait()
        open_newest, last = self.checkpoints.open_newest, step.verdict.no_later_than
        # One from after the trouble began is still better than none.
        reader = open_newest(self._run.warn, not_after=last) or open_newest(self._run.warn)
        if reader is None:  # nothing to go back to
            raise diverged(at, step.loss, step.norm, engine.lr)
        self.checkpoints.forget_after(reader.step)
        self._restore(reader)
        # What was learned of the bad steps outlasts the return to before they came.
        engine.guard.restore(guard)
        engine.guard.rolled_back(engine.steps_done)
        skipping = sorted(engine.guard.bad_steps)
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
        self.rung += 1
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
            micro_batch=engine.micro_batch,
            workers=engine.plan.workers,
        )
        rung = self.rung if split == "validation" else None
        self._run.emit(score.as_event(split=split, step=step, rung=rung))
        named = {f"{split}/{name}": value for name, value in score.metrics.items()}
        self._trackers.log(named, step=step)
        return score

    def take_best(self) -> tuple[int, dict[str, dict[str, float]]]:
        """Go back to the best weights, where some are kept; their step, and scores by split."""
        engine = self._engine
        keeps = engine.job.train.checkpoint.keep_best
        reader = self.checkpoints.open_best(self._run.warn) if keeps else None
        if reader is None:
            return engine.steps_done, {}
        with closing(reader):
            engine.state.read_weights(reader)
        return reader.step, {"validation": reader.metrics}

    def save_and_wait(self) -> None:
        """Save here and now, and until it is on the disk."""
        self._save({})
        self.checkpoints.wait()

    def _save(self, metrics: dict[str, float]) -> None:
        started_at = perf_counter()
        # Logged first: a life that goes on from this checkpoint does not repeat these steps.
        self.log.flush()
        state = self._engine.state
        self.checkpoints.save(
            state.snapshot(metrics=metrics, extra=self.state()),
            # Copied beside the next forward and backward passes; released gradients leave no such time.
            defer=self._engine.release is None,
            moving=state.moving(),
        )
        self._stall_s = perf_counter() - started_at
        self.log.charge("checkpoint_s", self._stall_s)

    def _announce(self, entry: CheckpointEntry, seconds: float) -> None:
        self._run.emit(
            CheckpointSaved(
                step=entry.step,
                path=entry.where.removeprefix(f"{self._run.location('')}/"),
                bytes=entry.bytes,
                seconds=seconds,
                stalled_s=self._stall_s,
                metrics=entry.metrics,
            )
        )


def _guard_settings(group: dict[str, Any]) -> dict[str, Any]:
    """What the job says of a group of weights; its rate is set before each step anyway."""
    return {key: value for key, value in group.items() if key not in {"params", "lr"}}
