"""A worker of a crew, which lives through generations.

Between two of them the others change, and with them the layout; the state stays in memory, or comes
from those who have it.
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
from yunlu.training.asynchronous.rules import against_serving
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
from yunlu.training.peer_replicas import PeerReplicas, StateReplica, describe, make_blank
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
    """What all workers of a node share."""

    job: Job
    parts: TrainingInputs
    pattern: nn.Module
    """The model's build without its weights: to cut a model up changes it for good."""


class ElasticWorker:
    """What one process keeps from generation to generation."""

    def __init__(self, agent: WorkerAgent, loaded: NodeInputs) -> None:
        self._agent, self._loaded = agent, loaded
        self._run = agent.run
        self._plan: Plan | None = None
        self._model: nn.Module | None = loaded.parts.model
        """As it was built; none once it was cut up."""
        self._engine: Engine | None = None
        self._watch: WorkerGroupCallbacks | None = None
        self._keeper: PeerReplicas | None = None
        self._seats: tuple[RankAssignment, ...] = ()
        self._machine: Machine | None = None
        self._given: list[TensorShard] = []
        self._given_numbers: dict[str, Any] | None = None
        """What those who left gave away."""
        self._log: WorkerGroupLog | None = None
        self._trackers = TrackerThread([], warn=self._run.warn)
        self._is_tracking = False
        self._most_samples: int | None = None
        """In a micro-batch: more did not fit."""
        self._is_whole = False
        """Whether the engine holds the state of the steps it counts."""
        self._life = 0

    # One generation.

    def take_part(self, assignment: Assignment) -> None:
        """Train in one generation: until it ends well, or others ask for or cause its end."""
        self._given, self._given_numbers = [], None
        self._seats = assignment.workers
        if assignment.departing:
            with self._agent.handoff_group(assignment):
                self._take_gifts(assignment)
            if assignment.is_departing:
                return
        device = _device(assignment, self._load_plan())
        if device.type == "cuda":
            torch.cuda.set_device(device)  # who only says "cuda" means this one
        world = self._agent.join_world(assignment, device)
        world.async_obstacle = against_serving(self._run, self._loaded.job, workers=world.layout.world)
        world.can_exclude_workers = True
        self._settle_in(assignment, world)
        self._train()

    def outlives(self, error: Exception) -> bool:
        """Whether another generation can go on where this one ended."""
        if self._agent.is_broken(error):
            return True
        if isinstance(error, UncoveredError):  # nobody has all of it: only the disk does
            self._is_whole, self._keeper = False, None
            return True
        engine = self._engine
        if engine is None or not is_out_of_memory(error) or not self._is_whole:
            return False
        size = smaller(engine.micro_batch)
        if size is None:
            return False
        self._most_samples = size
        open_run(self._run.address).emit(  # whoever leads: this is not its news
            MemoryExhausted(
                step=engine.steps_done + 1,
                micro_batch=size,
                message=str(error).partition("\n")[0][:200],
            )
        )
        return True

    def settle(self, detail: str = "") -> None:
        """Out of the generation: tell what we hold."""
        engine, watch = self._engine, self._watch
        step = 0
        if engine is not None:
            engine.abandon_step()
            step = engine.steps_done
        if watch is not None:
            watch.checkpoints.abandon()
        replicas = tuple(holding for copy in self._copies() for holding in copy.held_states)
        self._agent.report_paused(step, live=self._holds(step), replicas=replicas, detail=detail)

    def close(self) -> None:
        """The last words of this process; the run itself may go on without it."""
        with suppress(Exception):
            self._trackers.close()

    def _train(self) -> None:
        engine, watch = self._engine, self._watch
        assert engine is not None
        assert watch is not None
        ask = ""
        if not watch.stopped_early and engine.steps_done < engine.batch_schedule.steps:
            with memory_capped(self._cap_bytes(engine)):
                ask = loop.run(engine, watch)
                engine.synchronize()
        watch.log.flush()
        if ask == "pause":
            self._wait_for_save(watch)
            self.settle()
            return
        is_left = ask == "serve" and engine.steps_done > 0
        if is_left or (ask == "stop" and watch.is_to_be_saved()):
            watch.save_and_wait()
        if ask in {"stop", "serve"} or watch.decision is not None:
            watch.checkpoints.wait()
            self._meet_again()
            self._agent.report_done("async" if ask == "serve" else "stopped", engine.steps_done)
            return
        watch.checkpoints.wait()
        watch.begin_phase("export")
        machine = probe_machine()
        summary = finalize(
            self._run,
            engine,
            watch,
            describe_environment(machine),
            machine,
            pattern=self._loaded.pattern,
        )
        self._meet_again()
        self._trackers.finish(state=RunState.FINISHED, summary=summary)
        self._agent.report_done("finished", engine.steps_done)

    def _cap_bytes(self, engine: Engine) -> float | None:
        """What this worker may take, where it shares the memory of a machine with others."""
        if self._machine is None:
            self._machine = probe_machine()
        here = sum(seat.host == socket.gethostname() for seat in self._seats) or 1
        return cap_of_worker(self._loaded.job, self._machine, engine.device, workers=here)

    def _wait_for_save(self, watch: WorkerGroupCallbacks) -> None:
        # The next generation saves elsewhere: what is half written here would be lost.
        self._agent.report_progress(phase="checkpoint")
        watch.checkpoints.wait()
        self._meet_again()

    def _meet_again(self) -> None:
        """Nobody leaves before everyone is through: the others may still need what it holds."""
        if dist.is_initialized():
            dist.barrier()

    # Taking the state over.

    def _settle_in(self, assignment: Assignment, world: World) -> None:
        """Get the state that the generation begins with; until it is here, keep what we had."""
        restore, before = assignment.restore, self._engine
        held, numbers = self._find_held(assignment)
        self._agent.report_progress(phase="loading")
        stays = before is not None and bool(restore.sources) and _alike(before, world.layout)
        if before is not None and stays:
            plan = self._fit_plan(world.layout)
            before.rejoin(world, micro_batch=plan.micro_batch)
            torch.set_num_threads(plan.threads)
            engine = before
        else:
            engine = self._build(world, fresh=not restore.sources)
        self._run.is_quiet = not world.is_leader
        watch = self._make_watch(engine, world, assignment)
        resumed_from = restore.step
        if not restore.sources:
            resumed_from = watch.resume()
        elif restore.needs_transfer or not stays:
            is_here = stays and self._holds(restore.step)
            self._is_whole = self._is_whole and (is_here or not stays)
            self._fetch(engine, watch, held, numbers, restore.step or 0, is_here=is_here)
        engine.micro_batch = minimum_over_workers(
            min(engine.micro_batch, self._most_samples or sys.maxsize)
        )
        if before is not None and before is not engine:
            before.close()
        self._engine, self._watch, self._is_whole = engine, watch, True
        self._agent.state_restored(assignment, engine.steps_done)
        watch.begin(assignment.generation)
        if world.is_leader:
            self._speak(assignment, resumed_from)
        self._given, self._given_numbers = [], None
        self._keeper = PeerReplicas(engine, world, assignment.generation, before=self._copies())
        self._keep(0.0)

    def _speak(self, assignment: Assignment, resumed_from: int | None) -> None:
        """This worker leads: it writes for all from now on."""
        if not self._is_tracking:
            self._is_tracking = True
            names = ["tensorboard", *self._loaded.job.trackers]
            self._trackers = TrackerThread(open_trackers(names), warn=self._run.warn)
            assert self._watch is not None
            self._watch.track(self._trackers)
            self._trackers.start(self._run, self._loaded.job, resumed=resumed_from is not None)
        if assignment.restore.kind == "start":
            state = RunState.RUNNING
            self._run.emit(StateChanged(state=state, resumed_from_step=resumed_from))

    def _holds(self, step: int | None) -> bool:
        """Whether the engine has the state of this step, and all its parts are of it."""
        engine = self._engine
        if engine is None or not self._is_whole or engine.is_inconsistent:
            return False
        return engine.steps_done == step

    def _find_held(self, assignment: Assignment) -> tuple[list[TensorShard], dict[str, Any] | None]:
        """What we can give of the state asked for; the numbers are those of the same moment."""
        restore, engine, watch = assignment.restore, self._engine, self._watch
        if not restore.sources:
            return [], None
        if engine is not None and watch is not None and self._holds(restore.step):
            numbers = engine.state.numbers() | {"extra": watch.state()}
            return [*join_groups(engine.state.pieces()), *self._given], numbers
        for copy in self._copies():
            if copy.step == restore.step:
                return [*copy.pieces.values(), *self._given], copy.numbers
        return self._given, self._given_numbers

    def _fetch(
        self,
        engine: Engine,
        watch: WorkerGroupCallbacks,
        held: list[TensorShard],
        numbers: dict[str, Any] | None,
        step: int,
        *,
        is_here: bool,
    ) -> None:
        specs = gather_specs(held)
        wanted = {} if is_here else engine.state.wanted(specs)
        redistribute(held, join_groups(wanted))
        knows = gather_json(numbers is not None)
        told = broadcast_json(numbers, source=knows.index(True))
        if not is_here:
            engine.state.install(wanted, told, step=step)
            watch.restore(told["extra"])

    def _take_gifts(self, assignment: Assignment) -> None:
        """Those who leave give all they have of the state to one who stays."""
        held, numbers = self._find_held(assignment)
        workers = len(assignment.workers)
        told = [describe(piece) for piece in held] if assignment.is_departing else []
        everyone = gather_json({"pieces": told, "numbers": numbers if told else None})
        departing = everyone[workers:]
        taking = [
            make_blank(about)
            for number, guest in enumerate(departing)
            if number % workers == assignment.handoff_rank
            for about in guest["pieces"]
        ]
        redistribute(held if assignment.is_departing else [], taking)
        self._given = taking
        self._given_numbers = next((g["numbers"] for g in departing if g["numbers"]), None)

    # Making things.

    def _build(self, world: World, *, fresh: bool) -> Engine:
        """An engine of its own for a layout; ``fresh`` where the weights are to be the first ones."""
        if self._engine is not None:
            self._model = None  # it is in use, and may be cut up
        if self._model is not None:
            model = self._model
        elif fresh:
            model, _ = build_model(self._loaded.job, self._loaded.parts.task)
        else:
            model = blank_like(self._loaded.pattern)
        self._model = None
        job, plan = self._loaded.job, self._fit_plan(world.layout)
        torch.set_num_threads(plan.threads)
        parts = replace(self._loaded.parts, model=model)
        engine = Engine(job, plan, parts, self._run.emit, world=world)
        engine.keeps_ledger = True
        return engine

    def _make_watch(
        self, engine: Engine, world: World, assignment: Assignment
    ) -> WorkerGroupCallbacks:
        if self._log is None:
            self._life = len(read_attempts(self._run))
            self._log = WorkerGroupLog(
                self._run,
                device=engine.device,
                life=self._life,
                forward=lambda values, step: self._trackers.log(values, step=step),
            )
        crew = SaveGroup(
            rank=world.rank,
            size=world.layout.world,
            token=f"{self._life}-{assignment.generation}",
        )
        watch = WorkerGroupCallbacks(
            engine,
            self._run,
            agent=self._agent,
            crew=crew,
            log=self._log,
            trackers=self._trackers,
            life=self._life,
            keep=self._keep,
            forget_after=self._forget_after,
        )
        if self._watch is not None:
            watch.restore(self._watch.state())
        return watch

    def _fit_plan(self, layout: Layout) -> Plan:
        cores = psutil.cpu_count() or 1
        return fit_plan(self._load_plan(), self._loaded.job, layout, cores=cores)

    def _load_plan(self) -> Plan:
        if self._plan is None:
            self._plan = require_plan(self._run)
        return self._plan

    def _copies(self) -> list[StateReplica]:
        return [] if self._keeper is None else self._keeper.replicas

    def _forget_after(self, step: int) -> None:
        if self._keeper is not None:
            self._keeper.forget_after(step)

    def _keep(self, step_s: float) -> None:
        if self._keeper is not None and self._keeper.is_needed and self._watch is not None:
            if step_s:
                self._keeper.note(step_s)
            self._keeper.keep(self._watch.state())


def _alike(engine: Engine, layout: Layout) -> bool:
    """Whether an engine can go on in a layout as it is: whole weights and whole moments."""
    before = engine.world.layout
    is_cut = layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1
    return not (is_cut or engine.wrapped.is_partitioned or layout.zero1 or before.zero1)


def _device(assignment: Assignment, plan: Plan) -> torch.device:
    if plan.device == "cuda":
        return torch.device("cuda", assignment.slot)
    return torch.device(plan.device)
