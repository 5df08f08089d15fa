"""The program of a run whose workers train for servers: it keeps all of its processes alive.

``python -m yunlu.training.asynchronous.supervisor RUN_DIR --devices N`` stands where the supervisor of a crew
does. It loads everything once and forks the servers, the workers, and the *chief*, which evaluates
and saves. Whoever dies is forked again; the others do not stop. Other machines may lend workers
(``node.py``); they come and go as they like. The servers' directory is the truth: it outlives all of them.
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

from yunlu.core.settings import bind_address
from yunlu.planning.layout import Layout
from yunlu.runs.documents import read_job, read_number, require_plan
from yunlu.runs.events import (
    CommunicationChosen,
    EnvironmentRecorded,
    WorkerGroupFormed,
    WorkerRank,
)
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, require_local
from yunlu.runs.states import RunState
from yunlu.training.asynchronous.coordinator import AsyncCoordinator
from yunlu.training.asynchronous.join_server import JoinServer
from yunlu.training.asynchronous.process_group_supervisor import (
    STOPPED,
    ManagedProcess,
    ProcessGroupSupervisor,
    describe,
    last_step,
)
from yunlu.training.asynchronous.rules import refuse_job, refuse_plan
from yunlu.training.asynchronous.worker import fit, work
from yunlu.training.attempt import (
    RunBusyError,
    begin_attempt,
    change_state,
    latest_attempt,
    run_lock,
    signals_as_stop,
)
from yunlu.training.checkpoint.state import seed_everything
from yunlu.training.communication.servers.shard import serve
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.event_reporter import EventReporter
from yunlu.training.elastic.exec_module import unblock_stop_signals
from yunlu.training.environment import describe_environment
from yunlu.training.prepare import load_or_make_plan, prepare
from yunlu.training.probe import probe_machine

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.training_inputs import TrainingInputs

_LOOK_S = 0.05
_LEAVE_S = 10.0


def main() -> int:
    """The command line that the pool uses."""
    parser = argparse.ArgumentParser(prog="yunlu.training.asynchronous.supervisor")
    parser.add_argument("run", type=Path)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--here", type=int, help="workers of this machine; as many as devices")
    parser.add_argument("--shares", type=int, help="tickets of a step; as many as devices")
    parser.add_argument("--claim", help="claim on the run, passed on by the program before this")
    asked = parser.parse_args()
    state = run(
        asked.run,
        devices=asked.devices,
        here=asked.here,
        shares=asked.shares,
        claim=asked.claim,
    )
    return 1 if state is RunState.FAILED else 0


def run(
    run: Path,
    *,
    devices: int,
    here: int | None = None,
    shares: int | None = None,
    claim: str | None = None,
) -> RunState:
    """Live one life of a run, or go on with one; every way it can end is an event.

    Args:
        run: Of the run.
        devices: Workers of this program.
        here: Workers that share this machine, where others do.
        shares: Tickets of a step, where others than those here take part from the beginning.
        claim: The claim on the run, where a crew has begun this life and leaves the rest of it to us.
    """
    directory = open_run(run)
    # A fork copies no threads: none may have been started, by torch's kernels least of all.
    torch.set_num_threads(1)
    try:
        with run_lock(directory, passed_on=claim), signals_as_stop() as stop:
            unblock_stop_signals()
            asked = _Options(devices, here or devices, shares, goes_on=claim is not None)
            return _live(directory, stop, asked)
    except RunBusyError as error:  # the other's run: nothing of ours belongs in its log
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # noqa: BLE001 (the last border: it becomes an event)
        traceback.print_exc()
        with suppress(OSError):  # a full disk takes no words either
            EventReporter(directory).report_failure(describe(error), None)
            change_state(directory, RunState.FAILED)
    return RunState.FAILED


@dataclass(frozen=True, slots=True)
class _Options:
    """What the command line says."""

    devices: int
    here: int
    shares: int | None
    goes_on: bool
    """Whether a crew has begun this life."""


def _live(directory: RunStore, stop: StopRequest, asked: _Options) -> RunState:
    devices, shares, goes_on = asked.devices, asked.shares, asked.goes_on
    if goes_on:
        life, started_at = latest_attempt(directory)
    else:
        life, started_at = begin_attempt(directory)
        change_state(directory, RunState.PLANNING)
    job = _read_job(directory)
    refuse_job(job, workers=shares or devices)
    set_deterministic(job.train.deterministic)
    directory.is_quiet = goes_on  # all of this is told
    parts = prepare(directory, job)
    directory.is_quiet = False
    gc.collect()
    gc.freeze()  # what is loaded is garbage for nobody: collecting would only unshare its pages
    door = JoinServer(directory)
    fleet = ProcessGroupSupervisor(
        directory, in_child=door.abandon, rest=door.look, is_ending=lambda: stop.is_set
    )

    def settle() -> None:
        machine = probe_machine()
        directory.emit(EnvironmentRecorded(**describe_environment(machine)))
        if machine.best_device.kind == "cuda" and shares:  # each worker has one, wherever it is
            machine = machine.model_copy(update={"devices": (machine.best_device,) * shares})
        ours = job.model_copy(update={"devices": shares or devices})
        load_or_make_plan(directory, ours, parts, machine, started_at=started_at)

    try:
        door.publish(workers=devices, is_open=False)
        if not goes_on:
            fleet.complete(ManagedProcess("planner", settle))
        if stop.is_set:
            reason = "asked to stop before the first step"
            return change_state(directory, RunState.STOPPED, reason=reason)
        plan = require_plan(directory)
        if shares is not None:
            plan = plan.model_copy(update={"layout": Layout(dp=shares)})
        refuse_plan(plan)
        run = _AsyncRun(directory, job, plan, parts, life, asked)
        run.count_on()
        state = _train(fleet, door, run, stop)
        # Those who are in the middle of a ticket end it; what is not ended is handed out again.
        fleet.end(patience_s=_LEAVE_S)
    finally:
        fleet.end()
        door.shut()
    if state is RunState.FINISHED:
        directory.remove(Area.SERVERS)
        directory.remove(Document.TARGET_WORKERS)
    return change_state(directory, state)


def _read_job(directory: RunStore) -> Job:
    """The job, as if it named what its crew has chosen."""
    job = read_job(directory)
    spec = job.communication
    if spec.method == "asynchronous":
        return job
    told = [
        event.setting
        for event, _ in directory.read_events()
        if isinstance(event, CommunicationChosen)
    ]
    chosen = {"method": "asynchronous", "guarantee": "relaxed", "codec": told[-1].codec}
    return job.model_copy(update={"communication": spec.model_copy(update=chosen)})


def _train(
    fleet: ProcessGroupSupervisor, door: JoinServer, run: _AsyncRun, stop: StopRequest
) -> RunState:
    chief = ManagedProcess("chief", run.lead, is_stoppable=True)
    shards: list[ManagedProcess] = []
    workers: list[ManagedProcess] = []
    told = 0
    while not chief.is_over:
        fleet.keep_alive(chief)
        if shards := shards or run.make_shards():
            run.resize(workers, fleet)
        fleet.keep_alive(*shards, *workers)
        door.publish(
            workers=len(workers) or run.asked.devices, is_open=bool(shards), layout=run.plan.layout
        )
        if not any(place.is_over for place in workers):
            run.tell_crew(workers, door.list_workers())
        if stop.is_set and chief.pid not in {0, told}:
            told = chief.pid
            os.kill(chief.pid, signal.SIGTERM)
        door.look(_LOOK_S)
        fleet.bury()
    return RunState.STOPPED if chief.code == STOPPED else RunState.FINISHED


@dataclass
class _AsyncRun:
    """What the forked processes do."""

    directory: RunStore
    job: Job
    plan: Plan
    parts: TrainingInputs
    life: int
    asked: _Options
    _told: tuple[tuple[str, str, int], ...] = ()
    """Member, host and pid of each worker; members on other machines have names."""
    _generation: int = 0

    def count_on(self) -> None:
        """In a life that a crew has begun, its generations are counted on."""
        newest = read_view(self.directory).worker_group
        if self.asked.goes_on and newest is not None:
            self._generation = newest.generation + 1

    def make_shards(self) -> list[ManagedProcess]:
        """One for each server, when there is what they are to hold."""
        names = self.directory.names(Area.SERVERS)
        count = sum(name.startswith("shard-") for name in names)
        return [self._make_shard(index) for index in range(count)]

    def resize(self, workers: list[ManagedProcess], fleet: ProcessGroupSupervisor) -> None:
        """Have as many workers as are asked for now."""
        wanted = self._count_wanted()
        workers += [self._make_worker(number) for number in range(len(workers), wanted)]
        while len(workers) > wanted:
            fleet.dismiss(workers.pop())

    def _count_wanted(self) -> int:
        target = read_number(self.directory, Document.TARGET_WORKERS)
        return self.asked.devices if target is None else target

    def _make_shard(self, index: int) -> ManagedProcess:
        def body() -> None:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            serve(
                require_local(self.directory).directory(Area.SERVERS),
                index,
                bind_address(),
                with_parent=True,
            )

        return ManagedProcess(f"server-{index}", body, is_server=True)

    def _make_worker(self, number: int) -> ManagedProcess:
        def body() -> None:
            plan = fit(self.plan, self.job, slot=number, here=self.asked.here)
            work(self.directory, self.job, plan, self.parts, name=f"{number}.{os.getpid()}")

        return ManagedProcess(f"worker-{number}", body, number=number)

    def lead(self) -> int:
        """The chief's whole life."""
        with signals_as_stop() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            plan = fit(self.plan, self.job, slot=0, here=self.asked.here)
            seed_everything(self.job.train.seed)
            chief = AsyncCoordinator(
                self.directory,
                self.job,
                plan,
                self.parts,
                stop=stop,
                life=self.life,
                goes_on=self.asked.goes_on,
            )
            state = chief.lead()
        return STOPPED if state is RunState.STOPPED else 0

    def tell_crew(self, workers: list[ManagedProcess], elsewhere: list[dict[str, Any]]) -> None:
        """Say who the workers are, whenever that has changed."""
        here: list[dict[str, Any]] = [
            {"worker": str(number), "host": socket.gethostname(), "pid": place.pid}
            for number, place in enumerate(workers)
        ]
        everyone = [*here, *elsewhere]
        told = tuple((each["worker"], each["host"], each["pid"]) for each in everyone)
        if told == self._told or not all(place.pid for place in workers):
            return
        reason = "a lost worker is replaced" if len(told) == len(self._told) else "as asked"
        if {each[0] for each in told[len(here) :]} != {
            each[0] for each in self._told if not each[0].isdecimal()
        }:
            reason = "workers on another machine came or went"
        self.directory.emit(
            WorkerGroupFormed(
                generation=self._generation,
                layout=str(Layout(dp=len(told))),
                reason=reason,
                from_step=last_step(self.directory),
                redone_steps=0,
                ranks=tuple(
                    WorkerRank(rank=rank, dp=rank, **worker) for rank, worker in enumerate(everyone)
                ),
            )
        )
        self._told = told
        self._generation += 1


if __name__ == "__main__":
    sys.exit(main())
