"""Supervisor of an asynchronous run: starts servers, workers and the coordinator, and restarts them.

``python -m yunlu.training.asynchronous.supervisor RUN_DIR --devices N`` takes the place of the elastic
supervisor. It loads everything once and forks the servers, the workers, and the *coordinator*, which
evaluates and saves checkpoints. A process that dies is restarted; the others do not stop. Other nodes
(``node.py``) may join and leave with workers. The servers' directory holds the state and outlives all of them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.secrets import make_process_private
from yunlu.core.secure_link import bind_address
from yunlu.planning.layouts import Layout
from yunlu.runs.events import (
    CommunicationChosen,
    WorkerGroupFormed,
    WorkerRank,
)
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, read_job, read_number, require_local, require_plan
from yunlu.runs.states import RunState
from yunlu.training.asynchronous.coordinator import AsyncCoordinator
from yunlu.training.asynchronous.process_group_supervisor import (
    STOPPED,
    ManagedProcess,
    ProcessGroupSupervisor,
    describe_failure,
    last_step,
)
from yunlu.training.asynchronous.worker import fit_to_machine, train_worker
from yunlu.training.attempt import (
    RunBusyError,
    StopRequestedError,
    begin_attempt,
    change_state,
    latest_attempt,
    run_lock,
    signals_as_stop,
)
from yunlu.training.communication.servers.server import serve
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.exec_module import unblock_stop_signals
from yunlu.training.runner import Runner
from yunlu.training.topology.asynchronous import AsyncTopology, check_job, check_plan

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.attempt import StopRequest

_POLL_S = 0.05
_LEAVE_S = 10.0


def main() -> int:
    """Command line used by executors."""
    parser = argparse.ArgumentParser(prog="yunlu.training.asynchronous.supervisor")
    parser.add_argument("run", type=Path)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument(
        "--workers-here", type=int, help="workers on this machine; default: devices"
    )
    parser.add_argument("--shares", type=int, help="tickets per step; default: devices")
    parser.add_argument("--claim", help="claim on the run, inherited from the previous module")
    options = parser.parse_args()
    make_process_private()
    state = run(
        options.run,
        devices=options.devices,
        workers_here=options.workers_here,
        shares=options.shares,
        claim=options.claim,
    )
    return 1 if state is RunState.FAILED else 0


def run(
    run: Path,
    *,
    devices: int,
    workers_here: int | None = None,
    shares: int | None = None,
    claim: str | None = None,
) -> RunState:
    """Run one attempt of a run, or continue one; every outcome is an event.

    Args:
        run: Directory of the run.
        devices: Workers started here.
        workers_here: Workers that share this machine, if others do.
        shares: Tickets per step, if other workers than those here take part from the start.
        claim: The claim on the run, if a worker group started this attempt.
    """
    directory = open_run(run)
    # fork() does not copy threads: torch must not have started any.
    torch.set_num_threads(1)
    try:
        with run_lock(directory, passed_on=claim), signals_as_stop() as stop:
            unblock_stop_signals()
            options = _Options(
                devices, workers_here or devices, shares, continues_attempt=claim is not None
            )
            return _run_attempt(directory, stop, options)
    except StopRequestedError:
        return change_state(directory, RunState.STOPPED, reason=_NOT_BEGUN)
    except RunBusyError as error:  # the run belongs to another process: write nothing to its log
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # noqa: BLE001 (reported as an event)
        traceback.print_exc()
        with suppress(OSError):  # the disk may be full
            EventReporter(directory).report_failure(describe_failure(error), None)
            change_state(directory, RunState.FAILED)
    return RunState.FAILED


_NOT_BEGUN = "asked to stop before the first step"


@dataclass(frozen=True, slots=True)
class _Options:
    """Command-line options."""

    devices: int
    workers_here: int
    shares: int | None
    continues_attempt: bool
    """Whether a worker group started this attempt."""


def _run_attempt(directory: RunStore, stop: StopRequest, options: _Options) -> RunState:
    devices, shares, continues_attempt = options.devices, options.shares, options.continues_attempt
    if continues_attempt:
        attempt, started_at = latest_attempt(directory)
    else:
        attempt, started_at = begin_attempt(directory)
        change_state(directory, RunState.PLANNING)
    job = _read_job(directory)
    check_job(job, workers=shares or devices)
    topology = AsyncTopology(devices=devices, shares=shares, continues_attempt=continues_attempt)
    runner = Runner(directory, job, topology, attempt=attempt)
    directory.is_quiet = continues_attempt  # these events were written before
    with stop.interrupting():
        runner.prepare()
    directory.is_quiet = False
    gc.collect()
    gc.freeze()  # loaded objects stay: collecting them would unshare their pages
    group = AsyncCoordinator(directory)
    processes = ProcessGroupSupervisor(
        directory,
        in_child=group.abandon,
        wait=group.poll,
        is_ending=lambda: stop.is_set,
    )

    def make_plan() -> None:
        runner.record_environment()
        topology.make_plan(runner, started_at=started_at)

    try:
        group.publish(workers=devices, is_open=False)
        if not continues_attempt:
            with stop.interrupting():
                processes.run_to_end(ManagedProcess("planner", make_plan))
        if stop.is_set:
            return change_state(directory, RunState.STOPPED, reason=_NOT_BEGUN)
        plan = require_plan(directory)
        if shares is not None:
            plan = plan.model_copy(update={"layout": Layout(dp=shares)})
        check_plan(plan)
        runner.plan = plan
        run = _AsyncRun(runner, topology, options)
        run.continue_generations()
        state = _train(processes, group, run, stop)
        # Workers finish their current ticket; unfinished tickets are handed out again.
        processes.end(patience_s=_LEAVE_S)
    finally:
        processes.end()
        group.close()
    if state is RunState.FINISHED:
        directory.remove(Area.SERVERS)
        directory.remove(Document.TARGET_WORKERS)
    return change_state(directory, state)


def _read_job(directory: RunStore) -> Job:
    """The job, with the method that its worker group chose."""
    job = read_job(directory)
    spec = job.communication
    if spec.method == "asynchronous":
        return job
    reported = [
        event.setting
        for event, _ in directory.read_events()
        if isinstance(event, CommunicationChosen)
    ]
    chosen = {"method": "asynchronous", "guarantee": "relaxed", "codec": reported[-1].codec}
    return job.model_copy(update={"communication": spec.model_copy(update=chosen)})


def _train(
    processes: ProcessGroupSupervisor, group: AsyncCoordinator, run: _AsyncRun, stop: StopRequest
) -> RunState:
    coordinator = ManagedProcess("coordinator", run.run_coordinator, is_stoppable=True)
    shards: list[ManagedProcess] = []
    workers: list[ManagedProcess] = []
    reported = 0
    while not coordinator.is_done:
        processes.keep_alive(coordinator)
        if shards := shards or run.make_shards():
            run.resize(workers, processes)
        processes.keep_alive(*shards, *workers)
        group.publish(
            workers=len(workers) or run.options.devices,
            is_open=bool(shards),
            layout=run.runner.plan.layout,
        )
        if not any(process.is_done for process in workers):
            run.report_group(workers, group.list_workers())
        if stop.is_set and coordinator.pid not in {0, reported}:
            reported = coordinator.pid
            os.kill(coordinator.pid, signal.SIGTERM)
        group.poll(_POLL_S)
        processes.reap()
    return RunState.STOPPED if coordinator.code == STOPPED else RunState.FINISHED


@dataclass
class _AsyncRun:
    """Bodies of the forked processes."""

    runner: Runner
    topology: AsyncTopology
    options: _Options
    _reported_workers: tuple[tuple[str, str, int], ...] = ()
    """Worker, host and pid of each worker; workers of other nodes have names."""
    _generation: int = 0

    def continue_generations(self) -> None:
        """Continue the generation count of the worker group that started this attempt."""
        newest = read_view(self.runner.run).worker_group
        if self.options.continues_attempt and newest is not None:
            self._generation = newest.generation + 1

    def make_shards(self) -> list[ManagedProcess]:
        """One process per server, once their state exists."""
        names = self.runner.run.names(Area.SERVERS)
        count = sum(name.startswith("shard-") for name in names)
        return [self._make_shard(index) for index in range(count)]

    def resize(self, workers: list[ManagedProcess], processes: ProcessGroupSupervisor) -> None:
        """Start or dismiss workers to match the target."""
        target = self._target_workers()
        workers += [self._make_worker(number) for number in range(len(workers), target)]
        while len(workers) > target:
            processes.dismiss(workers.pop())

    def _target_workers(self) -> int:
        target = read_number(self.runner.run, Document.TARGET_WORKERS)
        return self.options.devices if target is None else target

    def _make_shard(self, index: int) -> ManagedProcess:
        def body() -> None:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            serve(
                require_local(self.runner.run).directory(Area.SERVERS),
                index,
                bind_address(),
                with_parent=True,
            )

        return ManagedProcess(f"server-{index}", body, is_server=True)

    def _make_worker(self, number: int) -> ManagedProcess:
        def body() -> None:
            runner = self._fit_to_machine(slot=number)
            train_worker(
                runner.run, runner.job, runner.plan, runner.inputs, name=f"{number}.{os.getpid()}"
            )

        return ManagedProcess(f"worker-{number}", body, number=number)

    def run_coordinator(self) -> int:
        """Body of the coordinator process."""
        with signals_as_stop() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            self.topology.stop = stop
            state = self._fit_to_machine(slot=0).train()
        return STOPPED if state is RunState.STOPPED else 0

    def _fit_to_machine(self, *, slot: int) -> Runner:
        """In a child: the runner with the plan for one device."""
        runner = self.runner
        runner.plan = fit_to_machine(
            runner.plan, runner.job, slot=slot, workers_here=self.options.workers_here
        )
        return runner

    def report_group(
        self, workers: list[ManagedProcess], remote_workers: list[dict[str, Any]]
    ) -> None:
        """Report the workers whenever they change."""
        workers_here: list[dict[str, Any]] = [
            {"worker": str(number), "host": socket.gethostname(), "pid": process.pid}
            for number, process in enumerate(workers)
        ]
        workers_now = [*workers_here, *remote_workers]
        reported = tuple((entry["worker"], entry["host"], entry["pid"]) for entry in workers_now)
        if reported == self._reported_workers or not all(process.pid for process in workers):
            return
        reason = (
            "a lost worker is replaced"
            if len(reported) == len(self._reported_workers)
            else "as requested"
        )
        if {entry[0] for entry in reported[len(workers_here) :]} != {
            entry[0] for entry in self._reported_workers if not entry[0].isdecimal()
        }:
            reason = "workers of another node joined or left"
        self.runner.run.emit(
            WorkerGroupFormed(
                generation=self._generation,
                layout=str(Layout(dp=len(reported))),
                reason=reason,
                from_step=last_step(self.runner.run),
                redone_steps=0,
                ranks=tuple(
                    WorkerRank(rank=rank, dp=rank, **worker)
                    for rank, worker in enumerate(workers_now)
                ),
            )
        )
        self._reported_workers = reported
        self._generation += 1


if __name__ == "__main__":
    sys.exit(main())
