"""The runner: one attempt at a run, or one worker's part of it.

Prepare, plan, build the engine, train with callbacks, finalise. What differs between one worker and
several is a ``Topology``: ``topology/single.py``, ``topology/launched.py`` (torchrun, srun, mpirun),
``topology/elastic.py``, and ``topology/asynchronous.py``.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import TrainingError
from yunlu.planning.plan import Measurement
from yunlu.runs.events import (
    AttemptStarted,
    EnvironmentRecorded,
    ModelExported,
    PredictionMeasured,
    ProgressReported,
)
from yunlu.runs.run_store import Area
from yunlu.runs.states import RunState
from yunlu.runs.step_batches import LatestSteps
from yunlu.runs.value_sample import ValueSample
from yunlu.training.attempt import StopRequestedError, change_state, describe_environment
from yunlu.training.determinism import seed_everything, set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.export import ModelLineage, export
from yunlu.training.hooks.callback import CallbackCaller, CallbackContext, open_callbacks
from yunlu.training.prepare import load_or_make_plan, prepare
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.tracker import TrackerThread, open_trackers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import TrainingCallbacks
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import TrainingInputs


class Topology:
    """Who trains a run together, and how they agree; by default one worker with nobody to agree with."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker writes events, logs and trackers."""
        return True

    def load(self, runner: Runner) -> TrainingInputs:
        """Load the data and build the model."""
        return prepare(runner.run, runner.job)

    def make_plan(self, runner: Runner, *, started_at: float) -> Plan:
        """The plan that all workers follow; ``started_at``: when the attempt began."""
        return load_or_make_plan(
            runner.run, runner.job, runner.inputs, runner.machine, started_at=started_at
        )

    def interruptible(self) -> AbstractContextManager[None]:
        """Context of work before and after the steps, which a stop request may end halfway."""
        return nullcontext()

    def why_not_train(self) -> str:
        """Why the attempt ends before the first step; empty if it does not."""
        return ""

    def join_world(self, runner: Runner) -> AbstractContextManager[World | None]:  # noqa: ARG002
        """Meet the other workers, and leave them at the end; None if there are none."""
        return nullcontext()

    def open_callbacks(self, runner: Runner) -> TrainingCallbacks:
        """The callbacks around every step."""
        raise NotImplementedError

    def begin(self, runner: Runner) -> None:
        """Restore the state to start from, and report that the run trains."""
        raise NotImplementedError

    def run_steps(self, runner: Runner) -> StepRequest:
        """Train until the last step, or until a request ends it for all workers before the same step."""
        raise NotImplementedError

    def leave(self, runner: Runner, request: StepRequest) -> RunState | None:
        """Answer the request; a state if this worker's part of the run is over without an end of its own."""

    def barrier(self) -> None:
        """Wait for all workers: they may still need what this one holds."""

    def release(self, runner: Runner, state: RunState) -> None:  # noqa: ARG002
        """Close what was opened; the model may belong to the user."""
        runner.callbacks.checkpoints.close()
        runner.engine.close()

    def end(self, runner: Runner, state: RunState) -> RunState:  # noqa: ARG002
        """Report the final state, unless somebody else does."""
        return state


class Runner:
    """State of one attempt in this process, and its phases in their order.

    The processes of an elastic group or of asynchronous workers each run some of the phases: a node
    prepares, a child of it plans, and its workers train.
    """

    plan: Plan
    inputs: TrainingInputs
    engine: Engine
    callbacks: TrainingCallbacks
    template: nn.Module | None = None
    """The full model without weights, where a worker may hold a part of it."""

    def __init__(self, run: RunStore, job: Job, topology: Topology, *, attempt: int = 0) -> None:
        self.run, self.job, self.topology, self.attempt = run, job, topology, attempt
        self.trackers = TrackerThread([], warn=run.warn)
        self.hooks = CallbackCaller()
        self.own_callbacks: Sequence[Any] = ()
        """Objects of the process that trains, besides those that the job names."""
        self.summary: dict[str, Any] = {}
        """Final scores, by split and metric."""

    @cached_property
    def machine(self) -> Machine:
        """The machine of this process."""
        return probe_machine()

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The machine, packages and code, for reproduction."""
        return describe_environment(self.machine)

    def run_attempt(self, *, started_at: float) -> RunState:
        """All phases in one process."""
        with self.topology.interruptible():
            self.record_environment()
            self.prepare()
            self.plan = self.topology.make_plan(self, started_at=started_at)
        if reason := self.topology.why_not_train():
            return change_state(self.run, RunState.STOPPED, reason=reason)
        return self.train()

    def record_environment(self) -> None:
        """Record what is needed to reproduce the run."""
        self.run.emit(EnvironmentRecorded(**self.environment))

    def prepare(self) -> None:
        """Load the data and build the model."""
        set_deterministic(self.job.train.deterministic)
        self.inputs = self.topology.load(self)

    def train(self) -> RunState:
        """Build the engine, train, finalise; returns the state in which this worker leaves the run."""
        topology, state = self.topology, RunState.FAILED
        with topology.join_world(self) as world:
            with topology.interruptible():
                seed_everything(self.job.train.seed)
                self.engine = self.build_engine(world)
                self.open_trackers()
                self.open_hooks()
                self.callbacks = topology.open_callbacks(self)
            try:
                with topology.interruptible():
                    topology.begin(self)
                state = self.run_in_world()
            except StopRequestedError:
                state = RunState.STOPPED
                raise
            finally:
                with suppress(OSError, TrainingError):  # an earlier failure takes precedence
                    self.callbacks.log.close()
                topology.release(self, state)
                if state is RunState.RUNNING:  # goes on elsewhere
                    self.trackers.close()
                else:
                    self.trackers.finish(state=state, summary=self.summary)
            return topology.end(self, state)

    def run_in_world(self) -> RunState:
        """Train with the workers that the engine has met; finalise after the last step."""
        topology = self.topology
        request = topology.run_steps(self)
        callbacks = self.callbacks  # others after an exclusion
        callbacks.log.flush()
        state = topology.leave(self, request)
        if state is not None:
            return state
        callbacks.checkpoints.wait()
        callbacks.hooks.call_checkpoints()
        state = RunState.STOPPED
        if callbacks.is_complete:
            callbacks.begin_phase("export")
            with topology.interruptible():
                self.summary = finalize(
                    self.run,
                    self.engine,
                    callbacks,
                    self.environment,
                    self.machine,
                    template=self.template,
                )
            state = RunState.FINISHED
        topology.barrier()
        return state

    def build_engine(self, world: World | None) -> Engine:
        """Build an engine for the plan; ``world``: the workers of a group."""
        torch.set_num_threads(self.plan.threads)
        engine = Engine(self.job, self.plan, self.inputs, self.run.emit, world=world)
        engine.keeps_ledger = world is not None
        return engine

    def open_trackers(self) -> None:
        """Open the trackers of the job, if this worker leads."""
        names = ["tensorboard", *self.job.trackers] if self.topology.is_leader else []
        self.trackers = TrackerThread(open_trackers(names), warn=self.run.warn)

    def open_hooks(self) -> None:
        """Make the callbacks of the job, if this worker leads."""
        wanted = [*self.job.callbacks, *self.own_callbacks]
        if self.topology.is_leader and wanted:
            context = CallbackContext(self.run, self.job, steps=self.plan.steps)
            self.hooks = CallbackCaller(open_callbacks(wanted), context, self.run.warn)

    def log_to_trackers(self, values: dict[str, float], step: int) -> None:
        """Forward a record of a step to the trackers."""
        self.trackers.log(values, step=step)


def finalize(
    directory: RunStore,
    engine: Engine,
    callbacks: TrainingCallbacks,
    environment: dict[str, Any],
    machine: Machine,
    *,
    template: nn.Module | None = None,
) -> dict[str, Any]:
    """Restore the best weights, score them on the test split, export them; all workers call this.

    ``template``: the full model without weights, where each worker holds a part of it.
    """
    step, scores = callbacks.take_best()
    if engine.splits.test is not None:
        directory.emit(ProgressReported(phase="scoring the test data"))
        scores["test"] = callbacks.score("test", step=step).metrics
    directory.emit(ProgressReported(phase="exporting the model"))
    model = _assemble_model(engine, template)
    if model is None:
        return {}
    lineage = ModelLineage(splits=engine.splits, environment=environment, step=step, scores=scores)
    names = export(directory, engine.job, engine.task, model, lineage)
    directory.emit(ModelExported(path=Area.MODEL.value, files=tuple(names), from_step=step))
    measured = measure_run(directory, samples=callbacks.samples_done, machine=machine)
    directory.emit(PredictionMeasured(measured=measured))
    return {
        f"{split}/{name}": value
        for split, metrics in scores.items()
        for name, value in metrics.items()
    }


def _assemble_model(engine: Engine, template: nn.Module | None) -> nn.Module | None:
    """The full model on the leader; None on other workers."""
    if not engine.wrapped.is_partitioned:
        return engine.best_view if engine.world.is_leader else None
    from yunlu.training.parallel.parallel_model import gather_model  # noqa: PLC0415 - only with several workers

    assert template is not None
    return gather_model(engine, template)


def measure_run(directory: RunStore, *, samples: int, machine: Machine) -> Measurement:
    """Memory, step time, throughput, total time and cost of a run that is about to finish."""
    # A step that a later attempt repeated counts once. Sums and a sample, not the steps themselves: millions
    # of them would not fit into memory beside the model.
    spans, busy_s, memory_bytes = ValueSample(), 0.0, 0.0
    for batch in LatestSteps(directory).batches():
        seconds = batch.get("data_s") + batch.get("compute_s")
        spans.add(seconds)
        busy_s += float(seconds.sum())
        memory_bytes = max(memory_bytes, float(batch.get("memory_bytes").max()))
    steps_s = spans.values.tolist()
    total_s = _active_seconds(directory)
    price = machine.dollars_per_hour
    return Measurement(
        memory_bytes=int(memory_bytes),
        step_s=median(steps_s) if steps_s else 0.0,
        samples_per_s=samples / busy_s if busy_s else 0.0,
        total_s=total_s,
        dollars=None if price is None else price * total_s / 3600,
    )


def _active_seconds(directory: RunStore) -> float:
    total_s, began_at, seen_at = 0.0, None, 0.0
    for event, _ in directory.read_events():
        if isinstance(event, AttemptStarted):
            total_s += seen_at - began_at if began_at is not None else 0.0
            began_at = event.began_at
        seen_at = event.at
    return total_s + (time.time() - began_at if began_at is not None else 0.0)
