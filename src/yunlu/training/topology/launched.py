"""Workers of an external launcher (torchrun, srun, mpirun): no supervisor, no forks.

The process of rank 0 is given the run's directory, all others ``-``: rank 0 shares the run with them,
and each prints it as its first line. If one fails, all end; the launcher may start them again, and they
resume from the newest checkpoint. Only excluded stragglers are continued without.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore

from yunlu.core.errors import JobError, StoreError
from yunlu.core.secure_link import derive_secret
from yunlu.planning.layout import Layout
from yunlu.planning.splitting import fit_plan, resplit
from yunlu.runs.documents import read_job, require_plan
from yunlu.runs.events import ErrorRaised, WorkerGroupFormed, WorkerLost, WorkerRank
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, require_local
from yunlu.runs.states import RunState
from yunlu.training.asynchronous.rules import find_async_obstacle
from yunlu.training.attempt import (
    RunBusyError,
    begin_attempt,
    change_state,
    run_lock,
    signals_as_stop,
)
from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module
from yunlu.training.parallel.parallel_model import template_of
from yunlu.training.parallel.world import form_world
from yunlu.training.prepare import load_or_make_plan
from yunlu.training.runner import Runner
from yunlu.training.topology.launch_rendezvous import describe_failure, join_rendezvous
from yunlu.training.topology.worker_group import GroupTopology

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from yunlu.core.launch import LaunchInfo
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import HeldClaim, RunStore
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.topology.launch_rendezvous import Rendezvous
    from yunlu.training.topology.worker_group import WorkerGroupCallbacks
    from yunlu.training.training_inputs import TrainingInputs

_FAREWELL_S = 5.0
"""Time for excluded workers to read the final state; they poll for it."""


def run_launched(path: Path | None, launch: LaunchInfo, *, run_index: int = 0) -> RunState:
    """Run one attempt together with the other ranks; rank 0 is given the path and reports how it ends."""
    rendezvous: Rendezvous | None = None
    with signals_as_stop() as stop:
        try:
            rendezvous = join_rendezvous(launch, run_index=run_index)
            return _lead(open_run(path), rendezvous, stop) if path else _follow(rendezvous, stop)
        except Exception as error:  # noqa: BLE001 (reported as an event)
            traceback.print_exc()
            if rendezvous is None:
                failure = describe_failure(error, launch.rank)
            else:
                rendezvous.leave()
                failure = rendezvous.explain(error)
            if path and not isinstance(error, RunBusyError):  # the run belongs to another process
                _report_failure(open_run(path), failure)
            return RunState.FAILED


def _lead(run: RunStore, rendezvous: Rendezvous, stop: StopRequest) -> RunState:
    with run_lock(run) as lock:
        job = read_job(run)
        # Set by the job, or chosen in an earlier attempt.
        is_served = job.communication.method == "asynchronous" or run.has(Area.SERVERS)
        is_over = read_view(run).state is RunState.FINISHED
        info = {"path": run.address, "directory": str(Path.cwd()), "is_over": is_over}
        rendezvous.share("run", info | {"is_served": is_served})
        if is_over:  # restarted after the run had finished
            rendezvous.barrier("end")
            return RunState.FINISHED
        if is_served:
            _switch_to_async(run, rendezvous, lock, is_new=True)
        rendezvous.watch_for_failure(lambda failure: _report_failure(run, failure))
        attempt, began_at = begin_attempt(run)
        rendezvous.share("attempt", attempt)
        change_state(run, RunState.PLANNING)
        runner = Runner(run, job, LaunchedTopology(rendezvous, stop), attempt=attempt)
        state = runner.run_attempt(started_at=began_at)
        if state is RunState.RUNNING:
            _switch_to_async(run, rendezvous, lock)
        return state


def _follow(rendezvous: Rendezvous, stop: StopRequest) -> RunState:
    info = rendezvous.share("run")
    print(info["path"], flush=True)  # noqa: T201 (to the parent: see above)
    run = open_run(Path(info["path"]))
    run.is_quiet = True
    if not run.has(Document.JOB):
        raise StoreError(
            f"{run.address} does not exist on this machine.",
            hint="All machines must see the same files: put YUNLU_HOME on a shared drive.",
        )
    if info["is_over"]:
        rendezvous.arrive("end")
        return RunState.FINISHED
    with suppress(OSError):
        os.chdir(info["directory"])
    _print_to(run, f"{Area.LOGS}/worker-{rendezvous.launch.rank}.log")
    if info["is_served"]:
        _switch_to_async(run, rendezvous)
    rendezvous.watch_for_failure(lambda _: None)
    attempt = rendezvous.share("attempt")
    runner = Runner(run, read_job(run), LaunchedTopology(rendezvous, stop), attempt=attempt)
    state = runner.run_attempt(started_at=0.0)
    if state is RunState.RUNNING:
        _switch_to_async(run, rendezvous)
    return state


class LaunchedTopology(GroupTopology):
    """All workers of a launch, or those that are not excluded, seen from one of them."""

    def __init__(self, rendezvous: Rendezvous, stop: StopRequest) -> None:
        super().__init__()
        self._rendezvous, self._stop = rendezvous, stop
        self._ranks = list(range(rendezvous.launch.size))
        """Launcher ranks of the workers that train."""
        self._generation = 1
        self._is_excluded = False

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self._rendezvous.is_leader

    def load(self, runner: Runner) -> TrainingInputs:
        """The first worker of a machine loads first; the others reuse what it downloads or caches."""
        rendezvous = self._rendezvous
        if rendezvous.launch.rank != rendezvous.first_here:
            rendezvous.wait([f"loaded-{rendezvous.first_here}"])
        inputs = super().load(runner)
        rendezvous.arrive("loaded")
        runner.template = template_of(inputs.model)
        return inputs

    def make_plan(self, runner: Runner, *, started_at: float) -> Plan:
        """Rank 0 plans; all share its layout."""
        rendezvous, layout = self._rendezvous, None
        cores = rendezvous.count_cores(runner.machine.cores)
        if rendezvous.is_leader:
            layout = self._plan_layout(runner, cores=cores, started_at=started_at)
        shared = rendezvous.share("layout", layout and layout.model_dump(mode="json"))
        layout = Layout.model_validate(shared)
        plan = require_plan(runner.run)
        return fit_plan(plan, runner.job, layout, cores=cores, nodes=rendezvous.nodes)

    def _plan_layout(self, runner: Runner, *, cores: int, started_at: float) -> Layout:
        """Layout for all launched workers; the plan of an earlier attempt may be for another number."""
        rendezvous, job = self._rendezvous, runner.job
        size = rendezvous.launch.size
        rendezvous.barrier("loaded")  # loading would disturb the measurements
        machine = runner.machine
        if machine.best_device.kind == "cuda":  # one per worker, on any machine
            machine = machine.model_copy(update={"devices": (machine.best_device,) * size})
        sized_job = job.model_copy(update={"devices": size})
        plan = load_or_make_plan(
            runner.run, sized_job, runner.inputs, machine, started_at=started_at
        )
        if plan.layout.world == size:
            return plan.layout
        plan, reason = resplit(plan, job, devices=size, cores=cores, nodes=rendezvous.nodes)
        count = plan.layout.world
        if count != size:
            raise JobError(
                f"{rendezvous.launch.launcher} started {size} workers, too many: {reason.partition(';')[0]}.",
                hint=f"Start {count}, or change the job so that {size} can share it.",
            )
        return plan.layout

    @contextmanager
    def join_world(self, runner: Runner) -> Generator[World]:
        """Meet all workers of the launch."""
        rendezvous, layout = self._rendezvous, runner.plan.layout
        device = _device(runner.plan, rendezvous.launch)
        rendezvous.barrier("forming")
        self._world = world = form_world(
            layout,
            rendezvous.launch.rank,
            PrefixStore("world", rendezvous.store),
            device=device,
            secret=derive_secret(rendezvous.secret, "world", self._generation),
            trusts_network=runner.job.communication.trust == "network",
            host=rendezvous.address or "127.0.0.1",
        )
        world.async_obstacle = find_async_obstacle(runner.run, runner.job, workers=layout.world)
        # Otherwise each holds a shard of the optimizer state.
        world.can_exclude_workers = not layout.zero1
        try:
            yield world
        finally:
            with suppress(Exception):  # a broken group need not close cleanly
                self._world.close()

    def open_callbacks(self, runner: Runner) -> WorkerGroupCallbacks:
        """Callbacks of this generation; only signals stop the workers."""
        return self.open_group_callbacks(
            runner, control=Unsupervised(self._stop), generation=self._generation
        )

    def begin(self, runner: Runner) -> None:
        """Resume from the newest checkpoint, if there is one."""
        resumed_from = runner.callbacks.resume()
        runner.trackers.start(runner.run, runner.job, resumed=resumed_from is not None)
        launch = self._rendezvous.launch
        self._begin_generation(runner, f"{launch.launcher} started {launch.size} workers")
        change_state(runner.run, RunState.RUNNING, resumed_from_step=resumed_from)

    def workers_here(self) -> int:
        """Number of workers on this machine."""
        return self._rendezvous.workers_here

    def run_steps(self, runner: Runner) -> StepRequest:
        """Train; after an exclusion, the workers that stay go on."""
        request = super().run_steps(runner)
        while request == "pause" and not runner.engine.communication.is_excluded:
            runner.callbacks.log.flush()
            self._continue_without(runner, runner.engine.communication.excluded)
            request = super().run_steps(runner)
        return request

    def leave(self, runner: Runner, request: StepRequest) -> RunState | None:
        """Save before a stop; wait if excluded; hand over to asynchronous workers."""
        callbacks = self.callbacks_of(runner)
        if request == "pause":
            return self._wait_excluded(runner)
        if request == "serve":  # all workers chose asynchronous training
            if runner.engine.steps_done:
                callbacks.save_and_wait()
            callbacks.checkpoints.wait()
            self.barrier()  # the leader's store is no longer needed
            return RunState.RUNNING
        if request == "stop":
            is_to_be_saved = callbacks.is_to_be_saved()
            if callbacks.decision is None:
                change_state(runner.run, RunState.STOPPING, reason="asked to stop")
            if is_to_be_saved:
                callbacks.save_and_wait()
        return None

    def end(self, runner: Runner, state: RunState) -> RunState:
        """Report the end to the run, and to excluded workers."""
        if state is not RunState.RUNNING and not self._is_excluded:
            change_state(runner.run, state)
            # Only after all ranks are through: whoever watches the run may kill the leader as soon as
            # the state is final.
            with suppress(RuntimeError):
                self.barrier()
            if self.is_leader:
                self._rendezvous.share("over", state.value)
                every = range(self._rendezvous.launch.size)
                excluded = [rank for rank in every if rank not in self._ranks]
                self._rendezvous.wait_for("over", excluded, within_s=_FAREWELL_S)
        return state

    def _begin_generation(self, runner: Runner, reason: str) -> None:
        """Begin a generation: all workers hold the same state."""
        self.callbacks_of(runner).begin(self._generation)
        layout, rendezvous = runner.engine.world.layout, self._rendezvous
        runner.run.emit(
            WorkerGroupFormed(
                generation=self._generation,
                layout=str(layout),
                reason=reason,
                from_step=runner.engine.steps_done,
                redone_steps=0,
                ranks=tuple(
                    WorkerRank(
                        rank=rank,
                        worker=str(agent),
                        host=rendezvous.hosts[agent],
                        pid=rendezvous.pids[agent],
                        **layout.place_of(rank)._asdict(),
                    )
                    for rank, agent in enumerate(self._ranks)
                ),
            )
        )

    def _continue_without(self, runner: Runner, excluded: Sequence[int]) -> None:
        """Form a new group without the excluded workers, before the same step; each holds the complete state."""
        left = [agent for rank, agent in enumerate(self._ranks) if rank in excluded]
        self._ranks = [agent for agent in self._ranks if agent not in left]
        self._generation += 1
        engine, rendezvous = runner.engine, self._rendezvous
        before, state = self._world, runner.callbacks.state()
        runner.callbacks.checkpoints.wait()
        before.close()
        layout = before.layout.model_copy(update={"dp": len(self._ranks)})
        self._world = world = form_world(
            layout,
            self._ranks.index(rendezvous.launch.rank),
            PrefixStore(f"world-{self._generation}", rendezvous.store),
            device=before.device,
            secret=derive_secret(rendezvous.secret, "world", self._generation),
            trusts_network=runner.job.communication.trust == "network",
            host=before.host,
        )
        # Asynchronous training needs all launched workers, and excluded ones would not be told.
        world.async_obstacle = "a worker is excluded"
        world.can_exclude_workers = before.can_exclude_workers
        nodes = len({rendezvous.hosts[agent] for agent in self._ranks})
        cores = engine.plan.threads * len(self._ranks)
        plan = fit_plan(engine.plan, engine.job, layout, cores=cores, nodes=nodes)
        engine.rejoin(world, micro_batch=plan.micro_batch)
        runner.callbacks = self.open_callbacks(runner)
        runner.callbacks.restore(state)
        names = ", ".join(str(agent) for agent in left)
        is_or_are = "is" if len(left) == 1 else "are"
        self._begin_generation(runner, f"worker {names} {is_or_are} excluded as a straggler")

    def _wait_excluded(self, runner: Runner) -> RunState:
        """Excluded as a straggler: wait for the final state of the run, or for a stop signal."""
        self._is_excluded = True
        runner.callbacks.checkpoints.wait()
        self._world.close()
        state = self._rendezvous.receive_unless("over", lambda: self._stop.is_set)
        self._rendezvous.arrive("over")
        return RunState.STOPPED if state is None else RunState(state)


class Unsupervised:
    """Control interface without a supervisor: only signals stop the worker."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self.wants_pause = False

    @property
    def wants_stop(self) -> bool:
        """Whether a stop signal was received."""
        return self._stop.is_set

    def check(self) -> None:
        """Never halted."""

    def request_exclusion(self) -> None:
        """Pause all workers before the same step; those that stay form a new group."""
        self.wants_pause = True

    def report_progress(self, **_: Any) -> None:
        """Discarded: there is no supervisor."""


def _switch_to_async(
    run: RunStore, rendezvous: Rendezvous, claim: HeldClaim | None = None, *, is_new: bool = False
) -> NoReturn:
    """Exec the asynchronous modules: rank 0 runs servers and a worker, the others one worker each.

    ``claim`` is the leader's claim on the run. ``is_new``: this is a new attempt of the run.
    """
    if rendezvous.is_leader:
        rendezvous.barrier("switch to async")  # the store ends with this process
    else:
        rendezvous.arrive("switch to async")
    here = ("--devices", "1", "--workers-here", str(rendezvous.workers_here))
    if not rendezvous.is_leader:
        arguments = (run.address, "--node", f"rank-{rendezvous.launch.rank}", *here)
        exec_module(ASYNC_NODE, *arguments)
    arguments = (run.address, *here, "--shares", str(rendezvous.launch.size))
    if not is_new:
        assert claim is not None
        arguments += ("--claim", claim.pass_on())
    exec_module(ASYNC_SUPERVISOR, *arguments, bind=rendezvous.address)


def _device(plan: Plan, launch: LaunchInfo) -> torch.device:
    if plan.device != "cuda":
        return torch.device(plan.device)
    # Some launchers expose only its own device to each worker.
    device = torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _report_failure(run: RunStore, failure: dict[str, Any]) -> None:
    who: dict[str, Any] = {name: failure.get(name) for name in ("rank", "worker", "host", "pid")}
    what = "failed" if failure.get("traceback") else "killed"
    try:
        run.emit(WorkerLost(cause=what, detail=failure["message"], **who))
        run.emit(ErrorRaised(**failure))
        change_state(run, RunState.FAILED)
    except OSError:
        sys.stderr.write(f"{failure}\n")  # not even the event log can be written


def _print_to(run: RunStore, log: str) -> None:
    """Redirect this process's output to its own log."""
    with require_local(run).open_text_log(log) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
