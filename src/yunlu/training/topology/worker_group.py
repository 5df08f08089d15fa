"""Workers of a group that train together, launched or elastic: all decide alike, the leader writes."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from yunlu.core.errors import TrainingError
from yunlu.runs.events import StateChanged
from yunlu.runs.run_store import Log, last_record
from yunlu.runs.states import RunState
from yunlu.training import loop
from yunlu.training.attempt import StopRequest
from yunlu.training.callbacks import MetricLog, TrainingCallbacks
from yunlu.training.checkpoint.store import SaveGroup
from yunlu.training.data.sample_order import digest_of
from yunlu.training.evaluate import Score
from yunlu.training.memory.out_of_memory import cap_of_worker, memory_capped
from yunlu.training.memory.peak import peak_resident_bytes
from yunlu.training.parallel.redistribute import broadcast_json, gather_json
from yunlu.training.runner import Topology
from yunlu.training.tasks.task import Evaluation
from yunlu.training.trial_control import PruneDecision

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore
    from yunlu.training.engine import Engine
    from yunlu.training.hooks.callback import CallbackCaller
    from yunlu.training.loop import Step
    from yunlu.training.parallel.world import World
    from yunlu.training.runner import Runner
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.trackers.tracker import TrackerThread

_REMEMBERED = 1024
"""Recent steps that every worker keeps: a new leader writes what the last one could not."""


def _nothing(_: float) -> None:
    """No replicas are kept."""


class WorkerControl(Protocol):
    """Control interface of a worker in a group: stop and pause requests, progress reports."""

    @property
    def wants_pause(self) -> bool:
        """Whether to pause before the next step."""
        ...

    @property
    def wants_stop(self) -> bool:
        """Whether to save and stop before the next step."""
        ...

    def check(self) -> None:
        """Raise if the generation was halted."""
        ...

    def request_exclusion(self) -> None:
        """Ask to leave: the other workers are faster without this straggler."""
        ...

    def report_progress(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        step_s: float | None = None,
        wait_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """Report progress to the supervisor."""
        ...


class WorkerGroupLog(MetricLog):
    """Metric log and sample ledger; every worker keeps the recent steps, the leader writes them."""

    def __init__(
        self,
        run: RunStore,
        *,
        device: torch.device,
        attempt: int,
        forward: Callable[[dict[str, float], int], None],
    ) -> None:
        super().__init__(run, device=device, attempt=attempt, forward=forward)
        self._ledger: list[dict[str, Any]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._recent_ledger: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._generation = 0
        self._is_leader = False

    def begin(self, generation: int, step: int, *, is_leader: bool) -> None:
        """Begin a generation after ``step`` steps; the worker that knows most unwritten records writes them."""
        self._generation, self._is_leader = generation, is_leader
        self._pending.clear()
        self._ledger.clear()
        records = _missing(self._recent, self._run, Log.METRICS, step)
        entries = _missing(self._recent_ledger, self._run, Log.LEDGER, step)
        self.forget_after(step)
        missing_counts = gather_json(len(records) + len(entries))
        rank = dist.get_rank() if dist.is_initialized() else 0
        if any(missing_counts) and missing_counts.index(max(missing_counts)) == rank:
            self._writer.append(records)
            self._run.append(Log.LEDGER, entries)

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one step."""
        record["generation"] = self._generation
        super().add(record)
        record.setdefault("memory_bytes", peak_resident_bytes())
        self._recent.append(record)

    def forget_after(self, step: int) -> None:
        """Forget later steps: the run was rolled back."""
        self._recent = _until_step(self._recent, step)
        self._recent_ledger = _until_step(self._recent_ledger, step)

    def add_to_ledger(self, step: int, samples: int, digest: int) -> None:
        """Add the samples of a completed step to the ledger."""
        record = {
            "step": step,
            "generation": self._generation,
            "samples": samples,
            "digest": f"{digest:016x}",
        }
        self._ledger.append(record)
        self._recent_ledger.append(record)

    def flush(self) -> None:
        """Write pending records if this worker is the leader."""
        if not self._is_leader:
            self._pending.clear()
            self._ledger.clear()
            return
        super().flush()
        records, self._ledger = self._ledger, []
        if records:
            self._run.append(Log.LEDGER, records)


class WorkerGroupCallbacks(TrainingCallbacks):
    """Callbacks in every worker; only the leader writes."""

    log: WorkerGroupLog

    def __init__(
        self,
        engine: Engine,
        run: RunStore,
        *,
        agent: WorkerControl,
        save_group: SaveGroup,
        log: WorkerGroupLog,
        trackers: TrackerThread,
        attempt: int,
        replicate: Callable[[float], None],
        forget_after: Callable[[int], None],
        hooks: CallbackCaller | None = None,
    ) -> None:
        """``replicate`` is called after each step with its seconds, to replicate state to peers.

        ``forget_after`` is called after a rollback to a step.
        """
        super().__init__(
            engine,
            run,
            trackers=trackers,
            stop=StopRequest(),
            attempt=attempt,
            hooks=hooks,
            group=save_group,
            log=log,
        )
        self._agent, self._replicate, self._forget_after = agent, replicate, forget_after
        self._phase = "first step"
        """Phase of the main thread when it does not wait for others."""
        engine.note_waiting = self._note_waiting
        self._track_order(engine.steps_done)

    def begin(self, generation: int) -> None:
        """Begin a generation at the engine's current step."""
        done, world = self._engine.steps_done, self._engine.world
        self._track_order(done)
        self.log.begin(generation, done, is_leader=world.is_leader)

    def _track_order(self, step: int) -> None:
        """Follow the sample order from this step on."""
        self._tracked_order = self._engine.order
        self._order, self._next_step = self._tracked_order.steps_from(step), step

    def lead(self, trackers: TrackerThread, hooks: CallbackCaller) -> None:
        """Use these trackers and callbacks from now on: this worker leads."""
        self._trackers, self.hooks = trackers, hooks

    def begin_phase(self, phase: str) -> None:
        """Begin a long phase that is not a step."""
        self._phase = phase
        self._agent.report_progress(phase=phase)

    def _note_waiting(self, *, is_over: bool = False) -> None:
        self._agent.report_progress(phase=self._phase if is_over else "sync")

    def before_step(self) -> StepRequest:
        """Request what the supervisor asked for from all workers."""
        self._agent.check()
        if self._engine.communication.is_excluded:
            self._agent.request_exclusion()
        if self._agent.wants_stop or self._is_pruned():
            return "stop"
        return super().before_step() or ("pause" if self._agent.wants_pause else "")

    def after_step(self, step: Step) -> bool:
        """As for a single worker; also writes the ledger and reports progress."""
        done = self._engine.steps_done
        self._phase = "step"
        self._check_samples(step, done - 1)
        self.log.add_to_ledger(done, step.samples, step.digest)
        step_s = step.compute_s + step.wait_s + step.data_s
        self._agent.report_progress(
            step=done,
            phase="step",
            step_s=step_s,
            wait_s=step.wait_s,
            memory_bytes=peak_resident_bytes(),
        )
        is_over = super().after_step(step)
        self._replicate(step_s)
        return is_over

    def is_to_be_saved(self) -> bool:
        """Whether to save after a stop; all workers agree. A pruned trial is not saved."""
        if self._trial_control is None:
            return True
        decision = self._trial_control.peek(self.rung) if self._engine.world.is_leader else None
        self.decision = _broadcast_decision(decision)
        if self.decision is None:
            return True
        self._run.emit(StateChanged(state=RunState.STOPPING, reason=self.decision.reason))
        return self.decision.kind == "hold"

    def _is_pruned(self) -> bool:
        """Between evaluations the leader requests a stop; at an evaluation all workers receive the decision."""
        if self._trial_control is None or not self._engine.world.is_leader:
            return False
        return self._trial_control.peek(self.rung) is not None

    def _read_decision(self, *, is_rung: bool) -> PruneDecision | None:
        if self._trial_control is None or not is_rung:
            return None
        decision = None
        self._engine.synchronize()
        if self._engine.world.is_leader:
            self._agent.report_progress(phase="evaluate")
            decision = self._trial_control.ask(self.rung, keep_waiting=self._is_wanted)
        else:
            self._note_waiting()
        decision = _broadcast_decision(decision)
        self._agent.report_progress(phase=self._phase)
        return decision

    def _is_wanted(self) -> bool:
        self._agent.check()
        return not self._agent.wants_stop

    def score(self, split: str, *, step: int | None = None) -> Score:
        """Evaluate on the first replica and broadcast the score."""
        before, self._phase = self._phase, "evaluate"
        self._engine.synchronize()
        self._agent.report_progress(phase="evaluate")
        score_here = (
            super().score(split, step=step) if self._engine.world.coordinates.dp == 0 else None
        )
        started_at = perf_counter()
        shared = broadcast_json(
            None
            if score_here is None
            else {
                "loss": score_here.loss,
                "evaluation": score_here.evaluation.model_dump(mode="json"),
            },
            source=0,
        )
        self._phase = before
        self._agent.report_progress(phase=before)
        # All workers use the same values, so that they decide alike.
        return Score(
            loss=float(shared["loss"]),
            evaluation=Evaluation.model_validate(shared["evaluation"]),
            seconds=perf_counter() - started_at if score_here is None else score_here.seconds,
        )

    def _save(self, metrics: dict[str, float]) -> None:
        self._engine.synchronize()
        self._agent.report_progress(phase="checkpoint")
        super()._save(metrics)
        self._agent.report_progress(phase=self._phase)

    def _is_in_doubt(self) -> bool:
        is_in_doubt, engine = super()._is_in_doubt(), self._engine
        if engine.communication.communicator.is_local_update:
            # Each worker judges its own steps, but all save or none does.
            return bool(engine.world.sum_over_all(torch.tensor([int(is_in_doubt)])))
        return is_in_doubt

    def _roll_back(self, step: Step) -> None:
        super()._roll_back(step)
        done = self._engine.steps_done
        self.log.forget_after(done)
        self._forget_after(done)

    def _check_samples(self, step: Step, number: int) -> None:
        """Check that each sample of the step was used by exactly one worker."""
        if number != self._next_step or self._tracked_order is not self._engine.order:
            self._track_order(number)  # after a rollback, or with another batch
        (indices,) = islice(self._order, 1)
        self._next_step = number + 1
        if step.digest != digest_of(indices):
            raise TrainingError(
                f"The workers did not take the samples of step {number + 1} once each.",
                hint="Do their data sets differ? Each must see the same samples in the same order.",
            )


class GroupTopology(Topology):
    """What the workers of every group share."""

    _world: World
    """The workers of the current generation."""

    def __init__(self) -> None:
        self._log: WorkerGroupLog | None = None
        """Kept across generations: a new leader writes what the last one could not."""

    def workers_here(self) -> int:
        """Number of workers that share this machine."""
        raise NotImplementedError

    def run_steps(self, runner: Runner) -> StepRequest:
        """Train in the current world, under this worker's share of the memory limit."""
        if runner.callbacks.is_complete:
            return ""
        engine = runner.engine
        cap = cap_of_worker(runner.job, runner.machine, engine.device, workers=self.workers_here())
        with memory_capped(cap):
            request = loop.run(engine, runner.callbacks)
            engine.synchronize()
        return request

    def barrier(self) -> None:
        """Wait for all workers: they may still need what this one holds."""
        if dist.is_initialized():  # not if all others are excluded
            dist.barrier()

    def release(self, runner: Runner, state: RunState) -> None:
        """Abandon the checkpoint of a broken group."""
        if state is RunState.FAILED:
            runner.callbacks.checkpoints.abandon()

    def callbacks_of(self, runner: Runner) -> WorkerGroupCallbacks:
        """The callbacks of this worker."""
        assert isinstance(runner.callbacks, WorkerGroupCallbacks)
        return runner.callbacks

    def open_group_callbacks(
        self,
        runner: Runner,
        *,
        control: WorkerControl,
        generation: int,
        replicate: Callable[[float], None] = _nothing,
        forget_after: Callable[[int], None] = _nothing,
    ) -> WorkerGroupCallbacks:
        """Callbacks of a generation: see ``WorkerGroupCallbacks``."""
        world = self._world
        self._log = self._log or WorkerGroupLog(
            runner.run,
            device=runner.engine.device,
            attempt=runner.attempt,
            forward=runner.log_to_trackers,
        )
        token = f"{runner.attempt}-{generation}"
        return WorkerGroupCallbacks(
            runner.engine,
            runner.run,
            agent=control,
            save_group=SaveGroup(rank=world.rank, size=world.layout.world, token=token),
            log=self._log,
            trackers=runner.trackers,
            attempt=runner.attempt,
            replicate=replicate,
            forget_after=forget_after,
            hooks=runner.hooks if world.is_leader else None,
        )


def _broadcast_decision(decision: PruneDecision | None) -> PruneDecision | None:
    """Broadcast the leader's decision."""
    shared = broadcast_json(None if decision is None else asdict(decision), source=0)
    return None if shared is None else PruneDecision(**shared)


def _until_step(recent: deque[dict[str, Any]], step: int) -> deque[dict[str, Any]]:
    return deque((record for record in recent if record["step"] <= step), maxlen=_REMEMBERED)


def _missing(
    recent: deque[dict[str, Any]], run: RunStore, log: Log, step: int
) -> list[dict[str, Any]]:
    last = last_record(run, log)
    written = 0 if last is None else int(last["step"])
    return [record for record in recent if written < record["step"] <= step]
