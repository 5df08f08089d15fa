"""A supervisor without torch: a run that trains nothing, but grows, shrinks, saves and resumes.

What it does in a step takes ``step_s`` of the job's model arguments, divided by its workers; every
step goes into the ledger once. It obeys the run directory's protocol, as the real one does.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from yunlu.core.files import append_lines
from yunlu.core.framing import FrameReader, receive_frame, send_frame
from yunlu.core.processes import start_time
from yunlu.core.secure_link import SecureLink
from yunlu.executors.worker_process import WorkerProcess, record_worker
from yunlu.planning.layouts import Layout
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    PlanMade,
    StateChanged,
    WorkerGroupFormed,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log, RunStore, last_record
from yunlu.runs.worker_group import (
    WorkerGroup,
    control_secret,
    write_worker_group,
)

sys.path.append(str(Path(__file__).parents[2]))  # it is run as a program
from tests.sample_events import sample

BATCH = 8


class LightWorkerGroup:
    """One attempt of a run."""

    def __init__(self, run: RunStore, devices: int) -> None:
        self.run, self.target, self.generation = run, devices, 0
        self.job = json.loads((run.path / Document.JOB).read_bytes())["model"]["args"]
        self.is_asked = False
        self.started_at = start_time()
        self.token = secrets.token_hex(8)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ, None)
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        self.is_asked = True

    def run_attempt(self) -> int:
        run = self.run
        attempts = sum(isinstance(event, AttemptStarted) for event, _ in run.read_events())
        self.save()
        host = socket.gethostname()
        record_worker(run, WorkerProcess(pid=os.getpid(), process_started_at=self.started_at,
                                         host=host, detached=True))  # fmt: skip
        run.emit(sample(AttemptStarted, number=attempts + 1, pid=os.getpid(),
                 process_started_at=self.started_at))  # fmt: skip
        run.emit(StateChanged(state="planning"))
        if self.job.get("fate") == "crash":
            return 3
        steps = int(self.job.get("steps", 100))
        run.emit(sample(PlanMade, batch=BATCH, micro_batch=BATCH, steps=steps))
        run.emit(StateChanged(state="running"))
        last = last_record(run, Log.LEDGER)
        step = last["step"] if last else 0
        while step < steps:
            if self.is_asked:
                run.emit(StateChanged(state="stopping", reason="asked to stop"))
                run.emit(CheckpointSaved(step=step, path="x", bytes=1, seconds=0.0))
                run.emit(StateChanged(state="stopped"))
                return 0
            step = self.make_step(step, attempts + 1)
        run.emit(StateChanged(state="finished"))
        return 0

    def make_step(self, step: int, attempt: int) -> int:
        if self.generation == 0 or self.workers != self.target:
            self.generation, self.workers = self.generation + 1, self.target
            ranks = [{"host": "here"} for rank in range(self.workers)]
            self.run.emit(sample(WorkerGroupFormed, generation=self.generation, layout=f"dp{self.workers}",
                          reason="", from_step=step, redone_steps=0, ranks=ranks, lost_s=0.1))  # fmt: skip
            self.save()
        span_s = float(self.job.get("step_s", 0.05)) / self.workers
        until = time.monotonic() + span_s
        while (left_s := until - time.monotonic()) > 0:
            self.listen(left_s)
        step += 1
        append_lines(self.run.path / Log.LEDGER, [{"step": step, "samples": BATCH}])
        record = {"step": step, "samples": step * BATCH, "at": time.time(), "attempt": attempt,
                  "compute_s": span_s, "generation": self.generation, "loss": 1.0}  # fmt: skip
        append_lines(self.run.path / Log.METRICS, [record])
        return step

    workers = 0

    def listen(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            if key.data is None:
                sock, _ = self.server.accept()
                link = SecureLink(sock, control_secret(self.token), is_server=True)
                self.selector.register(link, selectors.EVENT_READ, FrameReader())
                continue
            link: Any = key.fileobj
            try:
                self.answer(link, key.data)
                while link.pending:  # what has arrived with it makes the socket readable no more
                    self.answer(link, key.data)
            except (OSError, EOFError):
                self.selector.unregister(link)
                link.close()

    def answer(self, link: SecureLink, reader: FrameReader) -> None:
        message = receive_frame(link, reader).control
        if message.get("kind") == "resize":
            self.target = int(message["devices"])
            self.save()
            text = {"is_accepted": True, "text": "resized", "layout": f"dp{self.target}"}
            send_frame(link, text)

    def save(self) -> None:
        write_worker_group(
            self.run,
            WorkerGroup(
                host="127.0.0.1",
                port=self.server.getsockname()[1],
                token=self.token,
                pid=os.getpid(),
                process_started_at=self.started_at,
                node_module="x",
                generation=self.generation,
                target=self.target,
                layouts={count: Layout(dp=count).model_dump() for count in range(1, 9)},
            ),
        )


def main() -> int:
    run = open_run(Path(sys.argv[-1]))
    with (run.path / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return LightWorkerGroup(run, int(sys.argv[sys.argv.index("--devices") + 1])).run_attempt()


if __name__ == "__main__":
    sys.exit(main())
