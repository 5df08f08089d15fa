"""Another machine of an asynchronous run: it loads everything once, and keeps workers alive.

``python -m yunlu.training.asynchronous.node RUN_DIR --node NAME --devices N`` is what ``yunlu join``
starts. The run's directory says where the servers are; the line to the run's program is only for
telling who is here, and being told to go. While that is down, the workers go on.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from yunlu.core.settings import read_settings
from yunlu.planning.layout import Layout
from yunlu.runs.documents import read_job, require_plan
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area
from yunlu.runs.worker_group import WRONG_TOKEN, read_crew
from yunlu.training.asynchronous.process_group_supervisor import (
    ManagedProcess,
    ProcessGroupSupervisor,
    describe,
)
from yunlu.training.asynchronous.worker import fit, work
from yunlu.training.attempt import signals_as_stop
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.control_client import ControlClient, ControlLostError
from yunlu.training.elastic.exec_module import unblock_stop_signals
from yunlu.training.elastic.messages import (
    Exited,
    Forked,
    Leave,
    LeaveNotice,
    NodeHello,
    Ping,
    Prepared,
    Reply,
)
from yunlu.training.prepare import prepare

if TYPE_CHECKING:
    from yunlu.core.value import Value
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.elastic.messages import Message
    from yunlu.training.training_inputs import TrainingInputs

_TICK_S = 0.25
_QUIET_S = 5.0
"""The run's program speaks every second: who hears nothing was cut off, and looks for it again."""
_WAIT_S = 600.0
"""How long it is looked for; it goes on where it was when the run is resumed."""


def main() -> int:
    """The command line that ``yunlu join`` uses."""
    parser = argparse.ArgumentParser(prog="yunlu.training.asynchronous.node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--here", type=int, help="workers of this machine; as many as devices")
    asked = parser.parse_args()
    # A fork copies no threads: none may have been started, by torch's kernels least of all.
    torch.set_num_threads(1)
    with signals_as_stop() as stop:
        unblock_stop_signals()
        here = asked.here or asked.devices
        return AsyncNodeAgent(open_run(asked.run), asked.node, asked.devices, stop, here=here).run()


class AsyncNodeAgent:
    """Single-threaded: whoever forks must not have threads."""

    def __init__(
        self, run: RunStore, name: str, devices: int, stop: StopRequest, *, here: int
    ) -> None:
        run.is_quiet = True  # one machine writes the run's log
        self._run, self._name, self._devices, self._stop = run, name, devices, stop
        self._contact = ControlClient(run, quiet_s=_QUIET_S * read_settings().patience)
        self._fleet = ProcessGroupSupervisor(
            run,
            in_child=self._let_go,
            tell_loss=self._tell_loss,
            is_ending=lambda: stop.is_set,
        )
        self._here = here
        self._places: list[ManagedProcess] = []
        self._told: dict[str, int] = {}
        """Workers that the run's program knows of, with their pids."""
        self._is_prepared = False
        self._is_dismissed = False
        self._is_refused = False

    def run(self) -> int:
        """Until nobody needs it; its exit code."""
        try:
            self._lend()
        except Exception as error:  # noqa: BLE001 (the last border: it becomes a message)
            traceback.print_exc()
            self._tell(describe(error))
            return 1
        finally:
            self._fleet.end()
            self._contact.drop()
        return 1 if self._is_refused else 0

    def _lend(self) -> None:
        self._turn()
        if self._is_over():
            return
        job = read_job(self._run)
        set_deterministic(job.train.deterministic)
        parts = prepare(self._run, job)
        gc.collect()
        gc.freeze()  # what is loaded is garbage for nobody: collecting would only unshare its pages
        self._is_prepared = True
        self._tell(Prepared())
        while not self._is_open():
            if self._is_over():
                return
            self._turn()
        plan = self._read_plan()
        self._places = [self._make_place(n, job, plan, parts) for n in range(self._devices)]
        while not self._is_over():
            self._fleet.keep_alive(*self._places)
            self._tell_started()
            self._turn()
            self._fleet.bury()
        self._tell(LeaveNotice())

    def _read_plan(self) -> Plan:
        """The run's, with as many shares of a step as its tickets are."""
        plan, crew = require_plan(self._run), read_crew(self._run)
        layouts = [Layout.model_validate(each) for each in crew.layouts.values()] if crew else []
        return plan.model_copy(update={"layout": layouts[0]}) if layouts else plan

    def _is_open(self) -> bool:
        """Whether there are servers to work for."""
        crew = read_crew(self._run)
        return crew is not None and crew.generation > 0 and self._run.has(Area.SERVERS)

    def _is_over(self) -> bool:
        if self._stop.is_set or self._is_dismissed:
            return True
        if self._contact.is_up:
            return False
        # Our workers may have heard the end from the servers before we hear it from anybody.
        lost_s = time.monotonic() - self._contact.lost_at
        return lost_s > _WAIT_S or (lost_s > 1 and self._contact.is_over())

    def _make_place(
        self, number: int, job: Job, plan: Plan, parts: TrainingInputs
    ) -> ManagedProcess:
        def body() -> None:
            own = fit(plan, job, slot=number, here=self._here)
            work(self._run, job, own, parts, name=f"{self._name}.{number}.{os.getpid()}")

        return ManagedProcess(f"worker-{self._name}.{number}", body, number=number)

    def _turn(self) -> None:
        """Hear and say what there is, for a moment."""
        if not self._contact.is_up:
            if not self._contact.connect(self._hello()):
                time.sleep(_TICK_S / 5)
                return
            if self._is_prepared:
                self._tell(Prepared())
        connection = self._contact.connection
        if connection is None:
            return
        try:
            if select.select([connection], [], [], _TICK_S)[0]:
                for message in self._contact.receive():
                    self._hear(message)
            self._contact.send(Ping())
            self._contact.check_quiet()
        except ControlLostError:
            self._lose()

    def _hello(self) -> NodeHello:
        self._told.clear()  # a new program of the run knows nothing of us
        return NodeHello(
            token="",
            node=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started_at=psutil.Process().create_time(),
            devices=self._devices,
        )

    def _hear(self, message: Message) -> None:
        match message:
            case Leave():
                self._is_dismissed = True
            case Reply() if not message.is_accepted and message.text != WRONG_TOKEN:
                sys.stderr.write(f"not taken into the run: {message.text}\n")
                self._is_refused = self._is_dismissed = True
            case _:
                pass

    def _tell_started(self) -> None:
        for place in self._places:
            if place.pid and self._told.get(place.name) != place.pid and self._contact.is_up:
                self._told[place.name] = place.pid
                assert place.number is not None
                self._tell(
                    Forked(
                        member=place.number,
                        pid=place.pid,
                        process_started_at=psutil.Process(place.pid).create_time(),
                    )
                )

    def _tell_loss(self, place: ManagedProcess, _pid: int, code: int, words: str) -> None:
        assert place.number is not None
        self._tell(Exited(member=place.number, code=code, detail=words))

    def _tell(self, message: Value) -> None:
        try:
            self._contact.send(message)
        except ControlLostError:
            self._lose()

    def _lose(self) -> None:
        if self._contact.is_up:
            self._contact.drop()

    def _let_go(self) -> None:
        """In a worker: the line is the node's."""
        with suppress(OSError):
            if self._contact.connection is not None:
                self._contact.connection.close()


if __name__ == "__main__":
    sys.exit(main())
