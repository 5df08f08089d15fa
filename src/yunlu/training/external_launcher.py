"""A worker of a run whose processes torchrun, srun or mpirun started: no supervisor, no forks.

``python -m yunlu.training.external_launcher RUN_DIR`` in the process of rank 0, with ``-`` in all others:
rank 0 tells them which run it is, and each says so in its first line. One that fails ends all; whoever
launched them may start them again, and they go on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from yunlu.core.errors import JobError, StoreError, TrainingError
from yunlu.core.launch import detect_launch
from yunlu.core.settings import launch_variables
from yunlu.planning.layout import Layout
from yunlu.planning.splitting import fit_plan, resplit
from yunlu.runs.documents import read_job, require_plan
from yunlu.runs.events import EnvironmentRecorded, ErrorRaised, WorkerLost
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, require_local
from yunlu.runs.states import RunState
from yunlu.training import loop
from yunlu.training.asynchronous.rules import find_async_obstacle
from yunlu.training.attempt import (
    RunBusyError,
    begin_attempt,
    change_state,
    run_lock,
    signals_as_stop,
)
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.determinism import set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.external_group import ExternalWorkerGroup
from yunlu.training.finalize import finalize
from yunlu.training.launch_rendezvous import Rendezvous, describe_failure, join_rendezvous
from yunlu.training.memory.out_of_memory import cap_of_worker, memory_capped
from yunlu.training.parallel.parallel_model import pattern_of
from yunlu.training.parallel.world import form_world
from yunlu.training.prepare import load_or_make_plan, prepare
from yunlu.training.probe import probe_machine
from yunlu.training.switch_to_async import switch_to_async
from yunlu.training.trackers.registry import TrackerThread, open_trackers

if TYPE_CHECKING:
    from torch import nn

    from yunlu.core.launch import LaunchInfo
    from yunlu.hardware.machine import Machine
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.parallel.world import World
    from yunlu.training.training_inputs import TrainingInputs
    from yunlu.training.worker_group_callbacks import WorkerGroupCallbacks

_FAREWELL_S = 5.0
"""How long the leader waits for those who stand aside to hear of the end: they look all the time."""
_PARENT_DEATH_SIGNAL = 1


def main() -> int:
    """The command line that ``pool`` uses."""
    parser = argparse.ArgumentParser(prog="yunlu.training.external_launcher")
    parser.add_argument("run", help="the run's directory; - where rank 0 tells")
    parser.add_argument("--parent", type=int, help="the process to end with")
    parser.add_argument("--turn", type=int, default=0, help="runs trained before by this launch")
    asked = parser.parse_args()
    if asked.parent is not None:
        _end_with(asked.parent)
    place = detect_launch(launch_variables())
    if place is None or (place.rank == 0) == (asked.run == "-"):
        parser.error("this is for processes that a launcher started; rank 0 gets the directory")
    path = None if place.rank else Path(asked.run).absolute()
    state = run(path, place, turn=asked.turn)
    return 1 if state is RunState.FAILED else 0


def run(path: Path | None, place: LaunchInfo, *, turn: int = 0) -> RunState:
    """Live one life of a run together with the others; how it ends is told once, by rank 0."""
    muster: Rendezvous | None = None
    with signals_as_stop() as stop:
        try:
            muster = join_rendezvous(place, turn=turn)
            return _lead(open_run(path), muster, stop) if path else _follow(muster, stop)
        except Exception as error:  # noqa: BLE001 (the last border: it becomes an event)
            traceback.print_exc()
            if muster is None:
                failure = describe_failure(error, place.rank)
            else:
                muster.leave()
                failure = muster.explain(error)
            if path and not isinstance(error, RunBusyError):  # another's run: nothing of ours
                _tell_failure(open_run(path), failure)
            return RunState.FAILED


def _lead(run: RunStore, muster: Rendezvous, stop: StopRequest) -> RunState:
    with run_lock(run) as lock:
        job = read_job(run)
        # Named by the job, or chosen by those who were launched before us.
        is_served = job.communication.method == "asynchronous" or run.has(Area.SERVERS)
        is_over = _is_finished(run)
        about = {"path": run.address, "directory": str(Path.cwd()), "is_over": is_over}
        muster.share("run", about | {"is_served": is_served})
        if is_over:  # a restart because of something that came after the end
            muster.meet("end")
            return RunState.FINISHED
        if is_served:
            switch_to_async(run, muster, lock, is_new=True)
        muster.watch_for_failure(lambda failure: _tell_failure(run, failure))
        life, began_at = begin_attempt(run)
        muster.share("life", life)
        change_state(run, RunState.PLANNING)
        state = _take_part(run, muster, stop, life=life, began_at=began_at)
        if state is RunState.RUNNING:
            switch_to_async(run, muster, lock)
        return state


def _follow(muster: Rendezvous, stop: StopRequest) -> RunState:
    about = muster.share("run")
    print(about["path"], flush=True)  # noqa: T201 (to the parent: see above)
    run = open_run(Path(about["path"]))
    run.is_quiet = True
    if not run.has(Document.JOB):
        raise StoreError(
            f"{run.address} is not there on this machine.",
            hint="All machines must see the same files: put YUNLU_HOME on a shared drive.",
        )
    if about["is_over"]:
        muster.come("end")
        return RunState.FINISHED
    with suppress(OSError):
        os.chdir(about["directory"])
    _print_to(run, f"{Area.LOGS}/worker-{muster.place.rank}.log")
    if about["is_served"]:
        switch_to_async(run, muster)
    muster.watch_for_failure(lambda _: None)
    state = _take_part(run, muster, stop, life=muster.share("life"), began_at=0.0)
    if state is RunState.RUNNING:
        switch_to_async(run, muster)
    return state


def _take_part(
    run: RunStore, muster: Rendezvous, stop: StopRequest, *, life: int, began_at: float
) -> RunState:
    machine = probe_machine()
    run.emit(EnvironmentRecorded(**describe_environment(machine)))
    job = read_job(run)
    set_deterministic(job.train.deterministic)
    parts = _load(run, job, muster)
    pattern = pattern_of(parts.model)
    cores = muster.count_cores(machine.cores)
    layout = None
    if muster.leads:
        layout = _lay_out(run, job, parts, machine, muster, cores=cores, began_at=began_at)
    told = muster.share("layout", layout and layout.model_dump(mode="json"))
    plan = require_plan(run)
    layout = Layout.model_validate(told)
    plan = fit_plan(plan, job, layout, cores=cores, nodes=muster.nodes)
    device = _device(plan, muster.place)
    muster.meet("forming")
    store = PrefixStore("world", muster.store)
    host = muster.address or "127.0.0.1"
    world = form_world(layout, muster.place.rank, store, device=device, host=host)
    world.async_obstacle = find_async_obstacle(run, job, workers=layout.world)
    world.can_exclude_workers = not layout.zero1  # else each holds a part of the optimiser's state
    try:
        engine = _build(run, job, plan, parts, world)
        return _train(run, engine, muster, stop, life=life, machine=machine, pattern=pattern)
    finally:
        with suppress(Exception):  # what is broken need not be closed well
            world.close()


def _load(run: RunStore, job: Job, muster: Rendezvous) -> TrainingInputs:
    """One worker of a machine loads first: what it fetches or makes, the others find."""
    if muster.place.rank != muster.first_here:
        muster.wait([f"loaded-{muster.first_here}"])
    parts = prepare(run, job)
    muster.come("loaded")
    return parts


def _lay_out(
    run: RunStore,
    job: Job,
    parts: TrainingInputs,
    machine: Machine,
    muster: Rendezvous,
    *,
    cores: int,
    began_at: float,
) -> Layout:
    """The layout over all that were launched; the plan of an earlier life may be for others."""
    size = muster.place.size
    muster.meet("loaded")  # whoever loads disturbs what is measured now
    best = machine.best_device
    if best.kind == "cuda":  # each worker has one, on whichever machine
        machine = machine.model_copy(update={"devices": (best,) * size})
    asked = job.model_copy(update={"devices": size})
    plan = load_or_make_plan(run, asked, parts, machine, started_at=began_at)
    if plan.layout.world == size:
        return plan.layout
    plan, reason = resplit(plan, job, devices=size, cores=cores, nodes=muster.nodes)
    count = plan.layout.world
    if count != size:
        raise JobError(
            f"{muster.place.by} started {size} workers, too many: {reason.partition(';')[0]}.",
            hint=f"Start {count}, or change the job so that {size} can share it.",
        )
    return plan.layout


def _device(plan: Plan, place: LaunchInfo) -> torch.device:
    if plan.device != "cuda":
        return torch.device(plan.device)
    # Some launchers show each worker its own device only.
    device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _build(run: RunStore, job: Job, plan: Plan, parts: TrainingInputs, world: World) -> Engine:
    torch.set_num_threads(plan.threads)
    seed_everything(job.train.seed)
    engine = Engine(job, plan, parts, run.emit, world=world)
    engine.keeps_ledger = True
    return engine


def _train(
    run: RunStore,
    engine: Engine,
    muster: Rendezvous,
    stop: StopRequest,
    *,
    life: int,
    machine: Machine,
    pattern: nn.Module,
) -> RunState:
    names = ["tensorboard", *engine.job.trackers] if muster.leads else []
    trackers = TrackerThread(open_trackers(names), warn=run.warn)
    crew = ExternalWorkerGroup(run, engine, muster, trackers, stop, life=life)
    watch = crew.watch
    state, summary = RunState.FAILED, dict[str, Any]()
    try:
        _begin(crew, trackers)
        ask = _run(crew, machine)
        while ask == "pause":
            if engine.communication.is_aside:
                return _stand_aside(crew, trackers, stop)
            crew.go_on_without(engine.communication.aside)
            watch = crew.watch
            ask = _run(crew, machine)
        if ask == "stop":
            is_to_be_saved = watch.is_to_be_saved()
            if watch.decision is None:
                change_state(run, RunState.STOPPING, reason="asked to stop")
            if is_to_be_saved:
                watch.save_and_wait()
        if ask == "serve":
            return _leave_to_servers(engine, watch, trackers)
        if ask == "stop" or watch.decision is not None:
            watch.checkpoints.wait()
            state = RunState.STOPPED
        else:
            watch.checkpoints.wait()
            environment = describe_environment(machine)
            summary = finalize(run, engine, watch, environment, machine, pattern=pattern)
            state = RunState.FINISHED
        _meet_again()  # nobody leaves before everyone is through
        return _conclude(crew, trackers, state, summary)
    except BaseException:
        with suppress(OSError, TrainingError):  # whatever failed before is what gets told
            watch.log.flush()
        watch.checkpoints.abandon()
        trackers.finish(state=RunState.FAILED, summary={})
        raise


def _leave_to_servers(
    engine: Engine, watch: WorkerGroupCallbacks, trackers: TrackerThread
) -> RunState:
    """All have chosen to be asynchronous: the run goes on, and so does this life of it."""
    if engine.steps_done:
        watch.save_and_wait()
    watch.checkpoints.wait()
    trackers.close()
    _meet_again()  # nobody needs the leader's store any more
    return RunState.RUNNING


def _meet_again() -> None:
    if dist.is_initialized():  # not where all others stand aside
        dist.barrier()


def _run(crew: ExternalWorkerGroup, machine: Machine) -> str:
    """Train until the end, or until all stand before the same step because one asked."""
    engine, watch, ask = crew.engine, crew.watch, ""
    if not watch.stopped_early and engine.steps_done < engine.batch_schedule.steps:
        here = crew.muster.workers_here
        with memory_capped(cap_of_worker(engine.job, machine, engine.device, workers=here)):
            ask = loop.run(engine, watch)
            engine.synchronize()
    watch.log.flush()
    return ask


def _stand_aside(crew: ExternalWorkerGroup, trackers: TrackerThread, stop: StopRequest) -> RunState:
    """The others are faster without this worker: wait for how it ends, or for being told to go."""
    crew.watch.checkpoints.wait()
    trackers.close()
    crew.engine.world.close()
    muster = crew.muster
    state = muster.hear_unless("over", lambda: stop.is_set)
    muster.come("over")
    return RunState.STOPPED if state is None else RunState(state)


def _conclude(
    crew: ExternalWorkerGroup, trackers: TrackerThread, state: RunState, summary: dict[str, Any]
) -> RunState:
    trackers.finish(state=state, summary=summary)
    change_state(crew.run, state)
    # Once the others return, the run rests. Who is told so has all it came for: whoever shows the run
    # may have ended the leader by the time that the last of the others is here.
    with suppress(RuntimeError):
        _meet_again()
    if crew.muster.leads:
        crew.muster.share("over", state.value)
        aside = [rank for rank in range(crew.muster.place.size) if rank not in crew.ranks]
        crew.muster.wait_for("over", aside, within_s=_FAREWELL_S)
    return state


def _begin(crew: ExternalWorkerGroup, trackers: TrackerThread) -> None:
    resumed_from = crew.watch.resume()
    trackers.start(crew.run, crew.engine.job, resumed=resumed_from is not None)
    place = crew.muster.place
    crew.begin(f"{place.by} started {place.size} workers")
    change_state(crew.run, RunState.RUNNING, resumed_from_step=resumed_from)


def _tell_failure(run: RunStore, failure: dict[str, Any]) -> None:
    who = {name: failure.get(name) for name in ("rank", "worker", "host", "pid")}
    what = "failed" if failure.get("traceback") else "killed"
    try:
        run.emit(WorkerLost(cause=what, detail=failure["message"], **who))
        run.emit(ErrorRaised(**failure))
        change_state(run, RunState.FAILED)
    except OSError:
        sys.stderr.write(f"{failure}\n")  # not even the event log can be written


def _is_finished(run: RunStore) -> bool:
    return read_view(run).state is RunState.FINISHED


def _print_to(run: RunStore, log: str) -> None:
    """From here on this process prints to its own log."""
    with require_local(run).open_text_log(log) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def _end_with(parent: int) -> None:
    """Be ended together with the process that started us: its launcher knows of no other."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # ended while we were starting
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
