"""Worker of an elastic group; it trains in one generation after another.

Between generations the peers and the layout change; the state stays in memory, or is received from
the workers that hold it.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from yunlu.planning.splitting import fit_plan
from yunlu.runs.documents import require_plan
from yunlu.runs.events import MemoryExhausted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.states import RunState
from yunlu.training import loop
from yunlu.training.asynchronous.rules import find_async_obstacle
from yunlu.training.attempt import read_attempts
from yunlu.training.checkpoint.save_group import SaveGroup
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finalize import finalize
from yunlu.training.memory.out_of_memory import (
    cap_of_worker,
    is_out_of_memory,
    memory_capped,
    smaller,
)
from yunlu.training.parallel.parallel_model import blank_like
from yunlu.training.parallel.redistribute import (
    UncoveredError,
    broadcast_json,
    gather_json,
    gather_specs,
    minimum_over_workers,
    redistribute,
)
from yunlu.training.parallel.tensor_slices import join_groups
from yunlu.training.peer_replicas import (
    PeerReplicas,
    StateReplica,
    describe_shard,
    make_empty_shard,
)
from yunlu.training.prepare import build_model
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.registry import TrackerThread, open_trackers
from yunlu.training.worker_group_callbacks import WorkerGroupCallbacks, WorkerGroupLog

if TYPE_CHECKING:
    from torch import nn

    from yunlu.hardware.machine import Machine
    from yunlu.planning.layout import Layout
    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.elastic.messages import Assignment, RankAssignment
    from yunlu.training.elastic.worker_agent import WorkerAgent
    from yunlu.training.parallel.tensor_slices import TensorShard
    from yunlu.training.parallel.world import World
    from yunlu.training.training_inputs import TrainingInputs


@dataclass(frozen=True)
class NodeInputs:
    """Inputs shared by all workers of a node."""

    job: Job
    parts: TrainingInputs
    pattern: nn.Module
    """The model structure without weights: partitioning a model changes it permanently."""


class ElasticWorker:
    """Training state of one worker process across generations."""

    def __init__(self, agent: WorkerAgent, inputs: NodeInputs) -> None:
        self._agent, self._inputs = agent, inputs
        self._run = agent.run
        self._plan: Plan | None = None
        self._model: nn.Module | None = inputs.parts.model
        """As built; None once it may be partitioned."""
        self._engine: Engine | None = None
        self._callbacks: WorkerGroupCallbacks | None = None
        self._replicas: PeerReplicas | None = None
        self._seats: tuple[RankAssignment, ...] = ()
        self._machine: Machine | None = None
        self._received_shards: list[TensorShard] = []
        self._received_numbers: dict[str, Any] | None = None
        """State handed off by departing workers."""
        self._log: WorkerGroupLog | None = None
        self._trackers = TrackerThread([], warn=self._run.warn)
        self._is_tracking = False
        self._max_micro_batch: int | None = None
        """Largest micro-batch that fits in memory."""
        self._is_complete = False
        """Whether the engine holds the complete state of its step."""
        self._attempt = 0

    # Generation.

    def run_generation(self, assignment: Assignment) -> None:
        """Train in one generation until it ends, pauses or fails."""
        self._received_shards, self._received_numbers = [], None
        self._seats = assignment.workers
        self._agent.trusts_network = self._inputs.job.communication.trust == "network"
        if assignment.departing:
            with self._agent.handoff_group(assignment):
                self._receive_handoff(assignment)
            if assignment.is_departing:
                return
        device = _device(assignment, self._load_plan())
        if device.type == "cuda":
            torch.cuda.set_device(device)  # code that only says "cuda" uses this one
        world = self._agent.join_world(assignment, device)
        world.async_obstacle = find_async_obstacle(
            self._run, self._inputs.job, workers=world.layout.world
        )
        world.can_exclude_workers = True
        self._restore_state(assignment, world)
        self._train()

    def can_continue_after(self, error: Exception) -> bool:
        """Whether the worker can train in another generation after this error."""
        if self._agent.is_broken(error):
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
        open_run(self._run.address).emit(  # written even if this worker is not the leader
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
        self._agent.report_paused(step, live=self._holds(step), replicas=replicas, detail=detail)

    def close(self) -> None:
        """Close the trackers; the run may continue without this process."""
        with suppress(Exception):
            self._trackers.close()

    def _train(self) -> None:
        engine, callbacks = self._engine, self._callbacks
        assert engine is not None
        assert callbacks is not None
        request = ""
        if not callbacks.stopped_early and engine.steps_done < engine.batch_schedule.steps:
            with memory_capped(self._cap_bytes(engine)):
                request = loop.run(engine, callbacks)
                engine.synchronize()
        callbacks.log.flush()
        if request == "pause":
            self._wait_for_save(callbacks)
            self.report_paused()
            return
        is_left = request == "serve" and engine.steps_done > 0
        if is_left or (request == "stop" and callbacks.is_to_be_saved()):
            callbacks.save_and_wait()
        if request in {"stop", "serve"} or callbacks.decision is not None:
            callbacks.checkpoints.wait()
            self._barrier()
            self._agent.report_done("async" if request == "serve" else "stopped", engine.steps_done)
            return
        callbacks.checkpoints.wait()
        callbacks.begin_phase("export")
        machine = probe_machine()
        summary = finalize(
            self._run,
            engine,
            callbacks,
            describe_environment(machine),
            machine,
            template=self._inputs.pattern,
        )
        self._barrier()
        self._trackers.finish(state=RunState.FINISHED, summary=summary)
        self._agent.report_done("finished", engine.steps_done)

    def _cap_bytes(self, engine: Engine) -> float | None:
        """Memory limit of this worker if it shares a machine with others."""
        if self._machine is None:
            self._machine = probe_machine()
        here = sum(seat.host == socket.gethostname() for seat in self._seats) or 1
        return cap_of_worker(self._inputs.job, self._machine, engine.device, workers=here)

    def _wait_for_save(self, callbacks: WorkerGroupCallbacks) -> None:
        # The next generation saves elsewhere: a half-written checkpoint would be lost.
        self._agent.report_progress(phase="checkpoint")
        callbacks.checkpoints.wait()
        self._barrier()

    def _barrier(self) -> None:
        """Wait for all workers: they may still need what this one holds."""
        if dist.is_initialized():
            dist.barrier()

    # State handoff.

    def _restore_state(self, assignment: Assignment, world: World) -> None:
        """Restore the state the generation starts from; keep the old one until it is complete."""
        restore, before = assignment.restore, self._engine
        held, numbers = self._held_state(assignment)
        self._agent.report_progress(phase="loading")
        is_reused = (
            before is not None and bool(restore.sources) and _is_reusable(before, world.layout)
        )
        if before is not None and is_reused:
            plan = self._fit_plan(world.layout)
            before.rejoin(world, micro_batch=plan.micro_batch)
            torch.set_num_threads(plan.threads)
            engine = before
        else:
            engine = self._build(world, fresh=not restore.sources)
        self._run.is_quiet = not world.is_leader
        callbacks = self._make_callbacks(engine, world, assignment)
        resumed_from = restore.step
        if not restore.sources:
            resumed_from = callbacks.resume()
        elif restore.needs_transfer or not is_reused:
            is_local = is_reused and self._holds(restore.step)
            self._is_complete = self._is_complete and (is_local or not is_reused)
            self._fetch(engine, callbacks, held, numbers, restore.step or 0, is_local=is_local)
        engine.micro_batch = minimum_over_workers(
            min(engine.micro_batch, self._max_micro_batch or sys.maxsize)
        )
        if before is not None and before is not engine:
            before.close()
        self._engine, self._callbacks, self._is_complete = engine, callbacks, True
        self._agent.state_restored(assignment, engine.steps_done)
        callbacks.begin(assignment.generation)
        if world.is_leader:
            self._become_leader(assignment, resumed_from)
        self._received_shards, self._received_numbers = [], None
        self._replicas = PeerReplicas(
            engine, world, assignment.generation, before=self._state_replicas()
        )
        self._replicate(0.0)

    def _become_leader(self, assignment: Assignment, resumed_from: int | None) -> None:
        """Write events, trackers and logs for the group from now on."""
        if not self._is_tracking:
            self._is_tracking = True
            names = ["tensorboard", *self._inputs.job.trackers]
            self._trackers = TrackerThread(open_trackers(names), warn=self._run.warn)
            assert self._callbacks is not None
            self._callbacks.track(self._trackers)
            self._trackers.start(self._run, self._inputs.job, resumed=resumed_from is not None)
        if assignment.restore.kind == "start":
            state = RunState.RUNNING
            self._run.emit(StateChanged(state=state, resumed_from_step=resumed_from))

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
        held: list[TensorShard],
        numbers: dict[str, Any] | None,
        step: int,
        *,
        is_local: bool,
    ) -> None:
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

    def _build(self, world: World, *, fresh: bool) -> Engine:
        """Build an engine for a layout; ``fresh``: with initial weights."""
        if self._engine is not None:
            self._model = None  # in use, and may be partitioned
        if self._model is not None:
            model = self._model
        elif fresh:
            model, _ = build_model(self._inputs.job, self._inputs.parts.task)
        else:
            model = blank_like(self._inputs.pattern)
        self._model = None
        job, plan = self._inputs.job, self._fit_plan(world.layout)
        torch.set_num_threads(plan.threads)
        parts = replace(self._inputs.parts, model=model)
        engine = Engine(job, plan, parts, self._run.emit, world=world)
        engine.keeps_ledger = True
        return engine

    def _make_callbacks(
        self, engine: Engine, world: World, assignment: Assignment
    ) -> WorkerGroupCallbacks:
        if self._log is None:
            self._attempt = len(read_attempts(self._run))
            self._log = WorkerGroupLog(
                self._run,
                device=engine.device,
                attempt=self._attempt,
                forward=lambda values, step: self._trackers.log(values, step=step),
            )
        save_group = SaveGroup(
            rank=world.rank,
            size=world.layout.world,
            token=f"{self._attempt}-{assignment.generation}",
        )
        callbacks = WorkerGroupCallbacks(
            engine,
            self._run,
            agent=self._agent,
            save_group=save_group,
            log=self._log,
            trackers=self._trackers,
            attempt=self._attempt,
            replicate=self._replicate,
            forget_after=self._forget_after,
        )
        if self._callbacks is not None:
            callbacks.restore(self._callbacks.state())
        return callbacks

    def _fit_plan(self, layout: Layout) -> Plan:
        cores = psutil.cpu_count() or 1
        return fit_plan(self._load_plan(), self._inputs.job, layout, cores=cores)

    def _load_plan(self) -> Plan:
        if self._plan is None:
            self._plan = require_plan(self._run)
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


def _device(assignment: Assignment, plan: Plan) -> torch.device:
    if plan.device == "cuda":
        return torch.device("cuda", assignment.slot)
    return torch.device(plan.device)
