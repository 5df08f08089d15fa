"""The runner: one attempt at a run, or one worker's part of it.

Prepare, plan, build the engine, train with callbacks, finalise. What differs between one worker and
several is a ``Topology``: ``topology/single.py``, ``topology/launched.py`` (torchrun, srun, mpirun),
``topology/elastic.py``, and ``asynchronous/coordinator.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import TrainingError
from yunlu.runs.events import EnvironmentRecorded
from yunlu.runs.states import RunState
from yunlu.training.attempt import change_state
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.determinism import set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finalize import finalize
from yunlu.training.prepare import load_or_make_plan, prepare
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.registry import TrackerThread, open_trackers

if TYPE_CHECKING:
    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import TrainingCallbacks
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.training_inputs import TrainingInputs


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
            seed_everything(self.job.train.seed)
            self.engine = self.build_engine(world)
            self.open_trackers()
            self.callbacks = topology.open_callbacks(self)
            try:
                topology.begin(self)
                state = self.run_in_world()
            finally:
                with suppress(OSError, TrainingError):  # an earlier failure takes precedence
                    self.callbacks.log.flush()
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
        state = RunState.STOPPED
        if callbacks.is_complete:
            callbacks.begin_phase("export")
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

    def log_to_trackers(self, values: dict[str, float], step: int) -> None:
        """Forward a record of a step to the trackers."""
        self.trackers.log(values, step=step)
