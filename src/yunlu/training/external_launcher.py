"""Worker of an externally launched run (torchrun, srun, mpirun): no supervisor, no forks.

``python -m yunlu.training.external_launcher RUN_DIR`` in the process of rank 0, with ``-`` in all others:
rank 0 shares the run with the others, and each prints it as its first line. If one fails, all end; the
launcher may start them again, and they resume from the newest checkpoint.
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
from yunlu.core.private_process import make_process_private
from yunlu.core.secure_link import derive_secret
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
from yunlu.training.parallel.parallel_model import template_of
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
"""Time for excluded workers to read the final state; they poll for it."""
_PARENT_DEATH_SIGNAL = 1


def main() -> int:
    """Command line used by ``executors.external_launcher``."""
    parser = argparse.ArgumentParser(prog="yunlu.training.external_launcher")
    parser.add_argument("run", help="the run's directory; - on all ranks but 0")
    parser.add_argument("--parent", type=int, help="end when this process ends")
    parser.add_argument(
        "--run-index", type=int, default=0, help="runs trained before by this launch"
    )
    options = parser.parse_args()
    make_process_private()
    if options.parent is not None:
        _die_with(options.parent)
    launch = detect_launch(launch_variables())
    if launch is None or (launch.rank == 0) == (options.run == "-"):
        parser.error("for externally launched processes only; rank 0 is given the directory")
    path = None if launch.rank else Path(options.run).absolute()
    state = run(path, launch, run_index=options.run_index)
    return 1 if state is RunState.FAILED else 0


def run(path: Path | None, launch: LaunchInfo, *, run_index: int = 0) -> RunState:
    """Run one attempt together with the other ranks; rank 0 reports how it ends."""
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
        is_over = _is_finished(run)
        info = {"path": run.address, "directory": str(Path.cwd()), "is_over": is_over}
        rendezvous.share("run", info | {"is_served": is_served})
        if is_over:  # restarted after the run had finished
            rendezvous.barrier("end")
            return RunState.FINISHED
        if is_served:
            switch_to_async(run, rendezvous, lock, is_new=True)
        rendezvous.watch_for_failure(lambda failure: _report_failure(run, failure))
        attempt, began_at = begin_attempt(run)
        rendezvous.share("attempt", attempt)
        change_state(run, RunState.PLANNING)
        state = _run_attempt(run, rendezvous, stop, attempt=attempt, began_at=began_at)
        if state is RunState.RUNNING:
            switch_to_async(run, rendezvous, lock)
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
        switch_to_async(run, rendezvous)
    rendezvous.watch_for_failure(lambda _: None)
    state = _run_attempt(run, rendezvous, stop, attempt=rendezvous.share("attempt"), began_at=0.0)
    if state is RunState.RUNNING:
        switch_to_async(run, rendezvous)
    return state


def _run_attempt(
    run: RunStore, rendezvous: Rendezvous, stop: StopRequest, *, attempt: int, began_at: float
) -> RunState:
    machine = probe_machine()
    run.emit(EnvironmentRecorded(**describe_environment(machine)))
    job = read_job(run)
    set_deterministic(job.train.deterministic)
    parts = _load(run, job, rendezvous)
    pattern = template_of(parts.model)
    cores = rendezvous.count_cores(machine.cores)
    layout = None
    if rendezvous.is_leader:
        layout = _plan_layout(run, job, parts, machine, rendezvous, cores=cores, began_at=began_at)
    shared = rendezvous.share("layout", layout and layout.model_dump(mode="json"))
    plan = require_plan(run)
    layout = Layout.model_validate(shared)
    plan = fit_plan(plan, job, layout, cores=cores, nodes=rendezvous.nodes)
    device = _device(plan, rendezvous.launch)
    rendezvous.barrier("forming")
    store = PrefixStore("world", rendezvous.store)
    host = rendezvous.address or "127.0.0.1"
    world = form_world(
        layout,
        rendezvous.launch.rank,
        store,
        device=device,
        secret=derive_secret(rendezvous.secret, "world", 1),
        trusts_network=job.communication.trust == "network",
        host=host,
    )
    world.async_obstacle = find_async_obstacle(run, job, workers=layout.world)
    world.can_exclude_workers = (
        not layout.zero1
    )  # otherwise each holds a shard of the optimizer state
    try:
        engine = _build(run, job, plan, parts, world)
        return _train(
            run, engine, rendezvous, stop, attempt=attempt, machine=machine, pattern=pattern
        )
    finally:
        with suppress(Exception):  # a broken group need not close cleanly
            world.close()


def _load(run: RunStore, job: Job, rendezvous: Rendezvous) -> TrainingInputs:
    """The first worker of a machine loads first; the others reuse what it downloads or caches."""
    if rendezvous.launch.rank != rendezvous.first_here:
        rendezvous.wait([f"loaded-{rendezvous.first_here}"])
    parts = prepare(run, job)
    rendezvous.arrive("loaded")
    return parts


def _plan_layout(
    run: RunStore,
    job: Job,
    parts: TrainingInputs,
    machine: Machine,
    rendezvous: Rendezvous,
    *,
    cores: int,
    began_at: float,
) -> Layout:
    """Layout for all launched workers; the plan of an earlier attempt may be for another number."""
    size = rendezvous.launch.size
    rendezvous.barrier("loaded")  # loading would disturb the measurements
    device_type = machine.best_device
    if device_type.kind == "cuda":  # one per worker, on any machine
        machine = machine.model_copy(update={"devices": (device_type,) * size})
    sized_job = job.model_copy(update={"devices": size})
    plan = load_or_make_plan(run, sized_job, parts, machine, started_at=began_at)
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


def _device(plan: Plan, launch: LaunchInfo) -> torch.device:
    if plan.device != "cuda":
        return torch.device(plan.device)
    # Some launchers expose only its own device to each worker.
    device = torch.device("cuda", launch.local_rank % max(1, torch.cuda.device_count()))
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
    rendezvous: Rendezvous,
    stop: StopRequest,
    *,
    attempt: int,
    machine: Machine,
    pattern: nn.Module,
) -> RunState:
    names = ["tensorboard", *engine.job.trackers] if rendezvous.is_leader else []
    trackers = TrackerThread(open_trackers(names), warn=run.warn)
    group = ExternalWorkerGroup(run, engine, rendezvous, trackers, stop, attempt=attempt)
    callbacks = group.callbacks
    state, summary = RunState.FAILED, dict[str, Any]()
    try:
        _begin(group, trackers)
        request = _run(group, machine)
        while request == "pause":
            if engine.communication.is_excluded:
                return _wait_excluded(group, trackers, stop)
            group.continue_without(engine.communication.excluded)
            callbacks = group.callbacks
            request = _run(group, machine)
        if request == "stop":
            is_to_be_saved = callbacks.is_to_be_saved()
            if callbacks.decision is None:
                change_state(run, RunState.STOPPING, reason="asked to stop")
            if is_to_be_saved:
                callbacks.save_and_wait()
        if request == "serve":
            return _hand_over_to_async(engine, callbacks, trackers)
        if request == "stop" or callbacks.decision is not None:
            callbacks.checkpoints.wait()
            state = RunState.STOPPED
        else:
            callbacks.checkpoints.wait()
            environment = describe_environment(machine)
            summary = finalize(run, engine, callbacks, environment, machine, template=pattern)
            state = RunState.FINISHED
        _barrier()  # all ranks end together
        return _finish(group, trackers, state, summary)
    except BaseException:
        with suppress(OSError, TrainingError):  # report the original failure
            callbacks.log.flush()
        callbacks.checkpoints.abandon()
        trackers.finish(state=RunState.FAILED, summary={})
        raise


def _hand_over_to_async(
    engine: Engine, callbacks: WorkerGroupCallbacks, trackers: TrackerThread
) -> RunState:
    """All workers chose asynchronous training: save, and continue the attempt there."""
    if engine.steps_done:
        callbacks.save_and_wait()
    callbacks.checkpoints.wait()
    trackers.close()
    _barrier()  # the leader's store is no longer needed
    return RunState.RUNNING


def _barrier() -> None:
    if dist.is_initialized():  # not if all others are excluded
        dist.barrier()


def _run(group: ExternalWorkerGroup, machine: Machine) -> str:
    """Train until the end, or until a request stops all workers before the same step."""
    engine, callbacks, request = group.engine, group.callbacks, ""
    if not callbacks.stopped_early and engine.steps_done < engine.batch_schedule.steps:
        here = group.rendezvous.workers_here
        with memory_capped(cap_of_worker(engine.job, machine, engine.device, workers=here)):
            request = loop.run(engine, callbacks)
            engine.synchronize()
    callbacks.log.flush()
    return request


def _wait_excluded(
    group: ExternalWorkerGroup, trackers: TrackerThread, stop: StopRequest
) -> RunState:
    """Excluded as a straggler: wait for the final state of the run, or for a stop signal."""
    group.callbacks.checkpoints.wait()
    trackers.close()
    group.engine.world.close()
    rendezvous = group.rendezvous
    state = rendezvous.receive_unless("over", lambda: stop.is_set)
    rendezvous.arrive("over")
    return RunState.STOPPED if state is None else RunState(state)


def _finish(
    group: ExternalWorkerGroup, trackers: TrackerThread, state: RunState, summary: dict[str, Any]
) -> RunState:
    trackers.finish(state=state, summary=summary)
    change_state(group.run, state)
    # Only report the end after all ranks are through: whoever watches the run may kill the leader
    # as soon as the state is final.
    with suppress(RuntimeError):
        _barrier()
    if group.rendezvous.is_leader:
        group.rendezvous.share("over", state.value)
        excluded = [rank for rank in range(group.rendezvous.launch.size) if rank not in group.ranks]
        group.rendezvous.wait_for("over", excluded, within_s=_FAREWELL_S)
    return state


def _begin(group: ExternalWorkerGroup, trackers: TrackerThread) -> None:
    resumed_from = group.callbacks.resume()
    trackers.start(group.run, group.engine.job, resumed=resumed_from is not None)
    launch = group.rendezvous.launch
    group.begin(f"{launch.launcher} started {launch.size} workers")
    change_state(group.run, RunState.RUNNING, resumed_from_step=resumed_from)


def _report_failure(run: RunStore, failure: dict[str, Any]) -> None:
    who: dict[str, Any] = {name: failure.get(name) for name in ("rank", "worker", "host", "pid")}
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
    """Redirect this process's output to its own log."""
    with require_local(run).open_text_log(log) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def _die_with(parent: int) -> None:
    """Die with the process that started this one: the launcher knows only that one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended during the start
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
