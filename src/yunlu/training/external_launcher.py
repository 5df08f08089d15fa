"""A worker of a run whose processes torchrun, srun or mpirun started: no supervisor, no forks.

``python -m yunlu.training.launched RUN_DIR`` in the process of rank 0, with ``-`` in all others:
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
from yunlu.core.launch import launched
from yunlu.core.settings import launch_variables
from yunlu.planning.layout import Layout
from yunlu.planning.plan import Plan
from yunlu.planning.splitting import fit_plan, resplit
from yunlu.runs.run_dir import EventKind, RunDir
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.asynchronous.rules import against_serving
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.determinism import set_deterministic
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finalize import finish
from yunlu.training.giving_way import give_way
from yunlu.training.launched_crew import LaunchedCrew
from yunlu.training.attempt import RunBusyError, begin_life, move, only_worker, signals_as_stop
from yunlu.training.memory.shortage import cap_of_worker, memory_capped
from yunlu.training.muster import Muster, assemble, describe_failure
from yunlu.training.parallel.arrangement import pattern_of
from yunlu.training.parallel.world import form_world
from yunlu.training.prepare import prepare, settle_plan
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.open import TrackerThread, open_trackers

if TYPE_CHECKING:
    from torch import nn

    from yunlu.core.launch import Launched
    from yunlu.hardware.machine import Machine
    from yunlu.training.crew_watch import CrewWatch
    from yunlu.training.parallel.world import World
    from yunlu.training.training_inputs import Parts
    from yunlu.training.callbacks import StopRequest

_FAREWELL_S = 5.0
"""How long the leader waits for those who stand aside to hear of the end: they look all the time."""
_PARENT_DEATH_SIGNAL = 1


def main() -> int:
    """The command line that ``pool`` uses."""
    parser = argparse.ArgumentParser(prog="yunlu.training.launched")
    parser.add_argument("run_dir", help="the run's directory; - where rank 0 tells")
    parser.add_argument("--parent", type=int, help="the process to end with")
    parser.add_argument("--turn", type=int, default=0, help="runs trained before by this launch")
    asked = parser.parse_args()
    if asked.parent is not None:
        _end_with(asked.parent)
    place = launched(launch_variables())
    if place is None or (place.rank == 0) == (asked.run_dir == "-"):
        parser.error("this is for processes that a launcher started; rank 0 gets the directory")
    path = None if place.rank else Path(asked.run_dir).absolute()
    state = run(path, place, turn=asked.turn)
    return 1 if state is RunState.FAILED else 0


def run(path: Path | None, place: Launched, *, turn: int = 0) -> RunState:
    """Live one life of a run together with the others; how it ends is told once, by rank 0."""
    muster: Muster | None = None
    with signals_as_stop() as stop:
        try:
            muster = assemble(place, turn=turn)
            return _lead(RunDir(path), muster, stop) if path else _follow(muster, stop)
        except Exception as error:  # noqa: BLE001 (the last border: it becomes an event)
            traceback.print_exc()
            if muster is None:
                failure = describe_failure(error, place.rank)
            else:
                muster.leave()
                failure = muster.explain(error)
            if path and not isinstance(error, RunBusyError):  # another's run: nothing of ours
                _tell_failure(RunDir(path), failure)
            return RunState.FAILED


def _lead(run_dir: RunDir, muster: Muster, stop: StopRequest) -> RunState:
    with only_worker(run_dir) as lock:
        job = Job.model_validate_json(run_dir.job.read_bytes())
        # Named by the job, or chosen by those who were launched before us.
        is_served = job.communication.method == "asynchronous" or run_dir.servers.is_dir()
        is_over = _is_finished(run_dir)
        about = {"path": str(run_dir.path), "directory": str(Path.cwd()), "is_over": is_over}
        muster.share("run", about | {"is_served": is_served})
        if is_over:  # a restart because of something that came after the end
            muster.meet("end")
            return RunState.FINISHED
        if is_served:
            give_way(run_dir, muster, lock, is_new=True)
        muster.watch_for_failure(lambda failure: _tell_failure(run_dir, failure))
        life, began_at = begin_life(run_dir)
        muster.share("life", life)
        move(run_dir, RunState.PLANNING)
        state = _take_part(run_dir, muster, stop, life=life, began_at=began_at)
        if state is RunState.RUNNING:
            give_way(run_dir, muster, lock)
        return state


def _follow(muster: Muster, stop: StopRequest) -> RunState:
    about = muster.share("run")
    print(about["path"], flush=True)  # noqa: T201 (to the parent: see above)
    run_dir = RunDir(Path(about["path"]))
    run_dir.is_quiet = True
    if not run_dir.job.exists():
        raise StoreError(
            f"{run_dir.path} is not there on this machine.",
            hint="All machines must see the same files: put YUNLU_HOME on a shared drive.",
        )
    if about["is_over"]:
        muster.come("end")
        return RunState.FINISHED
    with suppress(OSError):
        os.chdir(about["directory"])
    _write_to(run_dir.logs / f"member-{muster.place.rank}.log")
    if about["is_served"]:
        give_way(run_dir, muster)
    muster.watch_for_failure(lambda _: None)
    state = _take_part(run_dir, muster, stop, life=muster.share("life"), began_at=0.0)
    if state is RunState.RUNNING:
        give_way(run_dir, muster)
    return state


def _take_part(
    run_dir: RunDir, muster: Muster, stop: StopRequest, *, life: int, began_at: float
) -> RunState:
    machine = probe_machine()
    run_dir.emit(EventKind.ENVIRONMENT, **describe_environment(machine))
    job = Job.model_validate_json(run_dir.job.read_bytes())
    set_deterministic(job.train.deterministic)
    parts = _load(run_dir, job, muster)
    pattern = pattern_of(parts.model)
    cores = muster.count_cores(machine.cores)
    layout = None
    if muster.leads:
        layout = _lay_out(run_dir, job, parts, machine, muster, cores=cores, began_at=began_at)
    told = muster.share("layout", layout and layout.model_dump(mode="json"))
    plan = Plan.model_validate_json(run_dir.plan.read_bytes())
    layout = Layout.model_validate(told)
    plan = fit_plan(plan, job, layout, cores=cores, nodes=muster.nodes)
    device = _device(plan, muster.place)
    muster.meet("forming")
    store = PrefixStore("world", muster.store)
    host = muster.address or "127.0.0.1"
    world = form_world(layout, muster.place.rank, store, device=device, host=host)
    world.hindrance = against_serving(run_dir, job, workers=layout.world)
    world.may_part = not layout.zero1  # else each holds a part of the optimiser's state
    try:
        engine = _build(run_dir, job, plan, parts, world)
        return _train(run_dir, engine, muster, stop, life=life, machine=machine, pattern=pattern)
    finally:
        with suppress(Exception):  # what is broken need not be closed well
            world.close()


def _load(run_dir: RunDir, job: Job, muster: Muster) -> Parts:
    """One worker of a machine loads first: what it fetches or makes, the others find."""
    if muster.place.rank != muster.first_here:
        muster.wait([f"loaded-{muster.first_here}"])
    parts = prepare(run_dir, job)
    muster.come("loaded")
    return parts


def _lay_out(
    run_dir: RunDir,
    job: Job,
    parts: Parts,
    machine: Machine,
    muster: Muster,
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
    plan = settle_plan(run_dir, asked, parts, machine, started_at=began_at)
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


def _device(plan: Plan, place: Launched) -> torch.device:
    if plan.device != "cuda":
        return torch.device(plan.device)
    # Some launchers show each worker its own device only.
    device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _build(run_dir: RunDir, job: Job, plan: Plan, parts: Parts, world: World) -> Engine:
    torch.set_num_threads(plan.threads)
    seed_everything(job.train.seed)
    engine = Engine(job, plan, parts, run_dir.emit, world=world)
    engine.keeps_ledger = True
    return engine


def _train(
    run_dir: RunDir,
    engine: Engine,
    muster: Muster,
    stop: StopRequest,
    *,
    life: int,
    machine: Machine,
    pattern: nn.Module,
) -> RunState:
    names = ["tensorboard", *engine.job.trackers] if muster.leads else []
    trackers = TrackerThread(open_trackers(names), warn=run_dir.warn)
    crew = LaunchedCrew(run_dir, engine, muster, trackers, stop, life=life)
    watch = crew.watch
    state, summary = RunState.FAILED, dict[str, Any]()
    try:
        _begin(crew, trackers)
        ask = _run(crew, machine)
        while ask == "pause":
            if engine.company.is_aside:
                return _stand_aside(crew, trackers, stop)
            crew.go_on_without(engine.company.aside)
            watch = crew.watch
            ask = _run(crew, machine)
        if ask == "stop":
            is_to_be_saved = watch.is_to_be_saved()
            if watch.ruling is None:
                move(run_dir, RunState.STOPPING, reason="asked to stop")
            if is_to_be_saved:
                watch.save_and_wait()
        if ask == "serve":
            return _leave_to_servers(engine, watch, trackers)
        if ask == "stop" or watch.ruling is not None:
            watch.checkpoints.wait()
            state = RunState.STOPPED
        else:
            watch.checkpoints.wait()
            environment = describe_environment(machine)
            summary = finish(run_dir, engine, watch, environment, machine, pattern=pattern)
            state = RunState.FINISHED
        _meet_again()  # nobody leaves before everyone is through
        return _conclude(crew, trackers, state, summary)
    except BaseException:
        with suppress(OSError, TrainingError):  # whatever failed before is what gets told
            watch.log.flush()
        watch.checkpoints.abandon()
        trackers.finish(state=RunState.FAILED, summary={})
        raise


def _leave_to_servers(engine: Engine, watch: CrewWatch, trackers: TrackerThread) -> RunState:
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


def _run(crew: LaunchedCrew, machine: Machine) -> str:
    """Train until the end, or until all stand before the same step because one asked."""
    engine, watch, ask = crew.engine, crew.watch, ""
    if not watch.stopped_early and engine.steps_done < engine.course.steps:
        here = crew.muster.workers_here
        with memory_capped(cap_of_worker(engine.job, machine, engine.device, workers=here)):
            ask = loop.run(engine, watch)
            engine.settle()
    watch.log.flush()
    return ask


def _stand_aside(crew: LaunchedCrew, trackers: TrackerThread, stop: StopRequest) -> RunState:
    """The others are faster without this worker: wait for how it ends, or for being told to go."""
    crew.watch.checkpoints.wait()
    trackers.close()
    crew.engine.world.close()
    muster = crew.muster
    state = muster.hear_unless("over", lambda: stop.is_set)
    muster.come("over")
    return RunState.STOPPED if state is None else RunState(state)


def _conclude(
    crew: LaunchedCrew, trackers: TrackerThread, state: RunState, summary: dict[str, Any]
) -> RunState:
    trackers.finish(state=state, summary=summary)
    move(crew.run_dir, state)
    # Once the others return, the run rests. Who is told so has all it came for: whoever shows the run
    # may have ended the leader by the time that the last of the others is here.
    with suppress(RuntimeError):
        _meet_again()
    if crew.muster.leads:
        crew.muster.share("over", state.value)
        aside = [rank for rank in range(crew.muster.place.size) if rank not in crew.ranks]
        crew.muster.wait_for("over", aside, within_s=_FAREWELL_S)
    return state


def _begin(crew: LaunchedCrew, trackers: TrackerThread) -> None:
    resumed_from = crew.watch.resume()
    trackers.start(crew.run_dir, crew.engine.job, resumed=resumed_from is not None)
    place = crew.muster.place
    crew.begin(f"{place.by} started {place.size} workers")
    move(crew.run_dir, RunState.RUNNING, resumed_from_step=resumed_from)


def _tell_failure(run_dir: RunDir, failure: dict[str, Any]) -> None:
    who = {name: failure.get(name) for name in ("rank", "member", "host", "pid")}
    what = "failed" if failure.get("traceback") else "killed"
    try:
        run_dir.emit(EventKind.FAULT, what=what, detail=failure["message"], **who)
        run_dir.emit(EventKind.ERROR, **failure)
        move(run_dir, RunState.FAILED)
    except OSError:
        sys.stderr.write(f"{failure}\n")  # not even the event log can be written


def _is_finished(run_dir: RunDir) -> bool:
    states = [event.data for event, _ in run_dir.read_events() if event.kind is EventKind.STATE]
    return bool(states) and states[-1].get("state") == RunState.FINISHED


def _write_to(log: Path) -> None:
    """From here on this process prints into its own file."""
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
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
