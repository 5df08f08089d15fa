"""Elastic group: one worker trains in one generation after another.

A node loads everything once; a child of it plans, and others are workers. Between generations the peers
and the layout change; the state stays in memory, or is received from the workers that hold it.
``python -m yunlu.training.topology.elastic RUN_DIR --node NAME --devices N`` is the program of a node.
"""

from __future__ import annotations

import importlib
import socket
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from yunlu.planning.layouts import Layout
from yunlu.planning.splitting import fit_plan, layouts_by_count
from yunlu.runs.events import MemoryExhausted
from yunlu.runs.home import open_run
from yunlu.runs.run_store import read_job, require_plan
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_worker_group
from yunlu.training.attempt import change_state, latest_attempt, read_attempts
from yunlu.training.device import open_device
from yunlu.training.elastic.node import run_node
from yunlu.training.memory.out_of_memory import is_out_of_memory, smaller
from yunlu.training.parallel.parallel_model import blank_like, template_of
from yunlu.training.parallel.redistribute import (
    UncoveredError,
    broadcast_json,
    gather_json,
    gather_specs,
    minimum_over_workers,
    redistribute,
)
from yunlu.training.peer_replicas import (
    PeerReplicas,
    StateReplica,
    describe_shard,
    make_empty_shard,
)
from yunlu.training.prepare import build_model
from yunlu.training.runner import Runner
from yunlu.training.tensor_slices import join_groups
from yunlu.training.topology.asynchronous import find_async_obstacle
from yunlu.training.topology.worker_group import GroupTopology

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.worker_group import WorkerGroup
    from yunlu.spec.job import Job
    from yunlu.training.elastic.messages import Assignment
    from yunlu.training.elastic.worker_agent import WorkerAgent
    from yunlu.training.engine import Engine
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import TrainingInputs
    from yunlu.training.tensor_slices import TensorShard
    from yunlu.training.topology.worker_group import WorkerGroupCallbacks

_MAX_WORKERS = 64


def load(run: RunStore) -> ElasticTopology:
    """Load the data and build the model, once for all workers of this machine."""
    group = read_worker_group(run)
    # A node that joins later repeats no events.
    run.is_quiet = group is not None and group.generation > 0
    job = read_job(run)
    if _may_partition(job, group):
        # Loaded here once, not during a recovery: sharding imports a compiler, which takes seconds.
        for name in ("yunlu.training.parallel.parallelize", "torch._dynamo"):
            importlib.import_module(name)
    topology = ElasticTopology(run, job)
    topology.runner.prepare()
    return topology


def plan_layouts(run: RunStore, topology: ElasticTopology, devices: int) -> dict[int, Layout]:
    """Make the plan, and the layout for every number of workers; in a child of the node.

    Measuring starts threads, which the forked workers would lack.
    """
    runner = topology.runner
    runner.record_environment()
    runner.job = runner.job.model_copy(update={"devices": devices})
    _, started_at = latest_attempt(run)
    plan = topology.make_plan(runner, started_at=started_at)
    return layouts_by_count(plan, runner.job, most=_MAX_WORKERS)


def work(agent: WorkerAgent, topology: ElasticTopology) -> None:
    """Train in one generation after another until dismissed."""
    topology.agent = agent
    while (assignment := agent.wait_assignment()) is not None:
        try:
            topology.run_generation(assignment)
        except Exception as error:
            if not topology.can_continue_after(error):
                raise
            topology.report_paused(detail=str(error).partition("\n")[0][:300])
        finally:
            agent.leave_groups()
    with suppress(Exception):
        topology.runner.trackers.close()  # the run may continue without this process


class ElasticTopology(GroupTopology):
    """A group whose workers change; in a worker, its training state across generations."""

    agent: WorkerAgent
    """Connection of this worker to the supervisor."""
    _assignment: Assignment
    """This worker's part in the current generation."""

    def __init__(self, run: RunStore, job: Job) -> None:
        super().__init__()
        self.runner = Runner(run, job, self)
        self._plan: Plan | None = None
        self._model: nn.Module | None = None
        """As built; None once it may be partitioned."""
        self._engine: Engine | None = None
        self._callbacks: WorkerGroupCallbacks | None = None
        self._replicas: PeerReplicas | None = None
        self._received_shards: list[TensorShard] = []
        self._received_numbers: dict[str, Any] | None = None
        """State handed off by departing workers."""
        self._held: tuple[list[TensorShard], dict[str, Any] | None] = ([], None)
        """What this worker holds of the state that the generation starts from."""
        self._max_micro_batch: int | None = None
        """Largest micro-batch that fits in memory."""
        self._is_complete = False
        """Whether the engine holds the complete state of its step."""
        self._is_tracking = False

    @property
    def is_leader(self) -> bool:
        """Whether this worker has rank 0."""
        return self._engine is not None and self._engine.world.is_leader

    def load(self, runner: Runner) -> TrainingInputs:
        """In the node, before any worker is forked."""
        inputs = super().load(runner)
        self._model, runner.template = inputs.model, template_of(inputs.model)
        return inputs

    # Generation.

    def run_generation(self, assignment: Assignment) -> None:
        """Train in one generation until it ends, pauses or fails."""
        self._assignment, runner = assignment, self.runner
        self._received_shards, self._received_numbers = [], None
        self.agent.trusts_network = runner.job.communication.trust == "network"
        if assignment.departing:
            with self.agent.handoff_group(assignment):
                self._receive_handoff(assignment)
            if assignment.is_departing:
                return
        with self.join_world(runner) as world:
            self._prepare_engine(world)
            self.begin(runner)
            self.end(runner, runner.run_in_world())

    @contextmanager
    def join_world(self, runner: Runner) -> Generator[World]:
        """Meet the workers of the generation; the agent leaves them."""
        device = open_device(self._load_plan().device, self._assignment.slot)
        self._world = world = self.agent.join_world(self._assignment, device)
        world.async_obstacle = find_async_obstacle(
            runner.run, runner.job, workers=world.layout.world
        )
        world.can_exclude_workers = True
        yield world

    def workers_here(self) -> int:
        """Number of workers of the generation on this machine."""
        host = socket.gethostname()
        return sum(worker.host == host for worker in self._assignment.workers) or 1

    def leave(self, runner: Runner, request: StepRequest) -> RunState | None:
        """Pause, save before a stop, or hand over to asynchronous workers."""
        callbacks = self.callbacks_of(runner)
        if request == "pause":
            # The next generation saves elsewhere: a half-written checkpoint would be lost.
            self.agent.report_progress(phase="checkpoint")
            callbacks.checkpoints.wait()
            self.barrier()
            self.report_paused()
            return RunState.RUNNING
        if request == "finish":
            callbacks.end_on_request(request)
            return None
        if request == "stop" and callbacks.hooks.reason:
            change_state(runner.run, RunState.STOPPING, reason=callbacks.hooks.reason)
        is_left = request == "serve" and runner.engine.steps_done > 0
        if is_left or (request == "stop" and callbacks.is_to_be_saved()):
            callbacks.save_and_wait()
        if request != "serve":
            return None
        callbacks.checkpoints.wait()
        self.barrier()
        self.agent.report_done("async", runner.engine.steps_done)
        return RunState.RUNNING

    def end(self, runner: Runner, state: RunState) -> RunState:
        """Report the end to the supervisor."""
        if state is RunState.FINISHED:
            runner.trackers.finish(state=state, summary=runner.summary)
            self.agent.report_done("finished", runner.engine.steps_done)
        elif state is RunState.STOPPED:
            self.agent.report_done("stopped", runner.engine.steps_done)
        return state

    def can_continue_after(self, error: Exception) -> bool:
        """Whether the worker can train in another generation after this error."""
        if self.agent.is_broken(error):
            return True
        if isinstance(
            error, UncoveredError
        ):  # no worker holds all parts: restore from a checkpoint
            self._is_complete, self._replicas = False, None
            return True
        engine = self._engine
        if engine is None or not is_out_of_memory(error) or not self._is_complete:
            return False
        size = smaller(engine.micro_batch)
        if size is None:
            return False
        self._max_micro_batch = size
        open_run(self.runner.run.address).emit(  # written even if this worker is not the leader
            MemoryExhausted(
                step=engine.steps_done + 1,
                micro_batch=size,
                message=str(error).partition("\n")[0][:200],
            )
        )
        return True

    def report_paused(self, detail: str = "") -> None:
        """Leave the generation and report the state held."""
        engine, callbacks = self._engine, self._callbacks
        step = 0
        if engine is not None:
            engine.abandon_step()
            step = engine.steps_done
        if callbacks is not None:
            callbacks.checkpoints.abandon()
        replicas = tuple(holding for copy in self._state_replicas() for holding in copy.held_states)
        self.agent.report_paused(step, live=self._holds(step), replicas=replicas, detail=detail)

    # State handoff.

    def begin(self, runner: Runner) -> None:
        """Restore the state the generation starts from; keep the old one until it is complete."""
        assignment, before, engine = self._assignment, self._engine, runner.engine
        restore, world, is_reused = assignment.restore, self._world, before is engine
        runner.run.is_quiet = not world.is_leader
        runner.callbacks = callbacks = self.open_callbacks(runner)
        resumed_from = restore.step
        if not restore.sources:
            resumed_from = callbacks.resume()
        elif restore.needs_transfer or not is_reused:
            is_local = is_reused and self._holds(restore.step)
            self._is_complete = self._is_complete and (is_local or not is_reused)
            self._fetch(engine, callbacks, restore.step or 0, is_local=is_local)
        engine.micro_batch = minimum_over_workers(
            min(engine.micro_batch, self._max_micro_batch or sys.maxsize)
        )
        if before is not None and before is not engine:
            before.close()
        self._engine, self._callbacks, self._is_complete = engine, callbacks, True
        self.agent.state_restored(assignment, engine.steps_done)
        callbacks.begin(assignment.generation)
        if world.is_leader:
            self._become_leader(resumed_from)
        self._received_shards, self._received_numbers = [], None
        self._held = [], None
        self._replicas = PeerReplicas(
            engine, world, assignment.generation, before=self._state_replicas()
        )
        self._replicate(0.0)

    def _become_leader(self, resumed_from: int | None) -> None:
        """Write events, trackers and logs for the group from now on."""
        runner = self.runner
        if not self._is_tracking:
            self._is_tracking = True
            runner.open_trackers()
            runner.open_hooks()
            self.callbacks_of(runner).lead(runner.trackers, runner.hooks)
            runner.trackers.start(runner.run, runner.job, resumed=resumed_from is not None)
        if self._assignment.restore.kind == "start":
            change_state(runner.run, RunState.RUNNING, resumed_from_step=resumed_from)

    def _holds(self, step: int | None) -> bool:
        """Whether the engine holds the complete state of this step."""
        engine = self._engine
        if engine is None or not self._is_complete or engine.is_inconsistent:
            return False
        return engine.steps_done == step

    def _held_state(
        self, assignment: Assignment
    ) -> tuple[list[TensorShard], dict[str, Any] | None]:
        """What this worker holds of the requested state, with the scalars of the same step."""
        restore, engine, callbacks = assignment.restore, self._engine, self._callbacks
        if not restore.sources:
            return [], None
        if engine is not None and callbacks is not None and self._holds(restore.step):
            numbers = engine.state.numbers() | {"extra": callbacks.state()}
            return [*join_groups(engine.state.shards()), *self._received_shards], numbers
        for copy in self._state_replicas():
            if copy.step == restore.step:
                return [*copy.pieces.values(), *self._received_shards], copy.numbers
        return self._received_shards, self._received_numbers

    def _fetch(
        self,
        engine: Engine,
        callbacks: WorkerGroupCallbacks,
        step: int,
        *,
        is_local: bool,
    ) -> None:
        held, numbers = self._held
        specs = gather_specs(held)
        wanted = {} if is_local else engine.state.target_shards(specs)
        redistribute(held, join_groups(wanted))
        has_numbers = gather_json(numbers is not None)
        described = broadcast_json(numbers, source=has_numbers.index(True))
        if not is_local:
            engine.state.install(wanted, described, step=step)
            callbacks.restore(described["extra"])

    def _receive_handoff(self, assignment: Assignment) -> None:
        """Receive all state of departing workers; each one sends to one worker that stays."""
        held, numbers = self._held_state(assignment)
        workers = len(assignment.workers)
        described = [describe_shard(shard) for shard in held] if assignment.is_departing else []
        gathered = gather_json({"pieces": described, "numbers": numbers if described else None})
        departing = gathered[workers:]
        receiving = [
            make_empty_shard(description)
            for number, source in enumerate(departing)
            if number % workers == assignment.handoff_rank
            for description in source["pieces"]
        ]
        redistribute(held if assignment.is_departing else [], receiving)
        self._received_shards = receiving
        self._received_numbers = next((g["numbers"] for g in departing if g["numbers"]), None)

    # Construction.

    def _prepare_engine(self, world: World) -> None:
        """The engine for the generation: the one at hand, or a new one for another layout."""
        restore, before, runner = self._assignment.restore, self._engine, self.runner
        self._held = self._held_state(self._assignment)
        self.agent.report_progress(phase="loading")
        runner.plan = fit_plan(
            self._load_plan(), runner.job, world.layout, cores=psutil.cpu_count() or 1
        )
        if before is None or not restore.sources or not _is_reusable(before, world.layout):
            runner.engine = self._build(world, fresh=not restore.sources)
            return
        before.rejoin(world, micro_batch=runner.plan.micro_batch)
        torch.set_num_threads(runner.plan.threads)
        runner.engine = before

    def _build(self, world: World, *, fresh: bool) -> Engine:
        """Build an engine for a layout; ``fresh``: with initial weights."""
        runner = self.runner
        if self._engine is not None:
            self._model = None  # in use, and may be partitioned
        if self._model is not None:
            model = self._model
        elif fresh:
            model, _ = build_model(runner.job, runner.inputs.task)
        else:
            assert runner.template is not None
            model = blank_like(runner.template)
        self._model = None
        runner.inputs = replace(runner.inputs, model=model)
        return runner.build_engine(world)

    def open_callbacks(self, runner: Runner) -> WorkerGroupCallbacks:
        """Callbacks of this generation; the supervisor controls the workers."""
        runner.attempt = runner.attempt or len(read_attempts(runner.run))
        callbacks = self.open_group_callbacks(
            runner,
            control=self.agent,
            generation=self._assignment.generation,
            replicate=self._replicate,
            forget_after=self._forget_after,
        )
        if self._callbacks is not None:
            callbacks.restore(self._callbacks.state())
        return callbacks

    def _load_plan(self) -> Plan:
        if self._plan is None:
            self._plan = require_plan(self.runner.run)
        return self._plan

    def _state_replicas(self) -> list[StateReplica]:
        return [] if self._replicas is None else self._replicas.replicas

    def _forget_after(self, step: int) -> None:
        if self._replicas is not None:
            self._replicas.forget_after(step)

    def _replicate(self, step_s: float) -> None:
        if self._replicas is not None and self._replicas.is_needed and self._callbacks is not None:
            if step_s:
                self._replicas.record_step_time(step_s)
            self._replicas.replicate(self._callbacks.state())


def _is_reusable(engine: Engine, layout: Layout) -> bool:
    """Whether an engine can continue in a layout unchanged: no sharded weights or optimizer state."""
    before = engine.world.layout
    is_cut = layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1
    return not (is_cut or engine.wrapped.is_partitioned or layout.zero1 or before.zero1)


def _may_partition(job: Job, group: WorkerGroup | None) -> bool:
    """Whether a worker may soon hold only a part of the model."""
    if group is None or not group.layouts:
        requested = job.layout
        return not requested.fsdp == requested.tp == requested.pp == 1
    # Layouts of a much larger group are not considered: they are imported when needed.
    nearby = [
        layout for count, layout in group.layouts.items() if count <= 2 * max(group.target, 2)
    ]
    layouts = [Layout.model_validate(layout) for layout in nearby]
    return any(layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1 for layout in layouts)


if __name__ == "__main__":
    sys.exit(run_node(prepare=load, plan=plan_layouts, body=work))
