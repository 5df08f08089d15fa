"""A worker that trains nothing, in real processes and real run directories: trials by the dozen.

``python toy_trial.py RUN_DIR`` makes one attempt of a run: it keeps to the protocol of the real worker
(lock, attempt, plan, evaluations, checkpoints, the gate) and needs no torch.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from yunlu.core.files import append_lines, write_atomically
from yunlu.core.processes import process_began_at, start_time
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    DataOpened,
    ErrorRaised,
    Evaluated,
    PlanMade,
    StateChanged,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, Log, RunStore
from yunlu.training.trial_control import TrialControl

sys.path.append(str(Path(__file__).parents[2]))  # it is run as a program
from tests.sample_events import sample

STEP_S = 0.004
STEPS_PER_RUNG = 5


def loss_of(lr: float, rung: int) -> float:
    """A curve that falls towards a floor; the best rate is 1e-2."""
    return abs(math.log10(lr) + 2) + 1 / rung


class ToyTrial:
    """One attempt; the files say where the last one stopped."""

    def __init__(self, run: RunStore) -> None:
        self.run = run
        self.job: dict[str, Any] = json.loads((run.path / Document.JOB).read_bytes())
        self.is_asked_to_stop = False
        signal.signal(signal.SIGTERM, self._note_stop)

    def _note_stop(self, *_: Any) -> None:
        self.is_asked_to_stop = True

    def move(self, state: str, **about: Any) -> None:
        self.run.emit(StateChanged(state=state, **about))

    def live(self) -> None:
        run = self.run
        attempts = sum(isinstance(event, AttemptStarted) for event, _ in run.read_events())
        started_at = start_time()
        run.emit(
            AttemptStarted(number=attempts + 1, pid=os.getpid(), process_started_at=started_at,
            began_at=process_began_at(),
        ))  # fmt: skip
        self.move("planning")
        args, train = self.job["model"]["args"], self.job["train"]
        if args.get("fails"):
            message = f"a rate of {train['optimizer']['lr']} is not to my liking"
            run.emit(ErrorRaised(code="training", message=message, hint="take another"))
            self.move("failed")
            return
        every = 0 if args.get("silent") else STEPS_PER_RUNG
        steps = math.ceil(train["epochs"]) * STEPS_PER_RUNG
        run.emit(sample(DataOpened, train=40, validation=8, test=0))
        run.emit(sample(PlanMade, steps=steps, evaluate_every=every, batch=8, best_metric="loss"))
        self.train(steps, train["optimizer"]["lr"], step_s=args.get("step_s", STEP_S))

    def train(self, steps: int, lr: float, *, step_s: float) -> None:
        run = self.run
        first = max(
            (int(path.name[5:]) for path in (run.path / Area.CHECKPOINTS).glob("step-*")), default=0
        )
        self.move("running", resumed_from_step=first or None)
        gate = TrialControl(run, patience_s=math.inf)  # however busy whoever conducts it is
        for step in range(first + 1, steps + 1):
            time.sleep(step_s)
            append_lines(run.path / Log.METRICS, [{"step": step, "loss": 1.0, "at": time.time()}])
            rung, rest = divmod(step, STEPS_PER_RUNG)
            ruling = gate.peek(rung)
            if rest == 0:
                loss = loss_of(lr, rung)
                run.emit(
                    Evaluated(split="validation", step=step, rung=rung, loss=loss,
                    metrics={"accuracy": 1 / (1 + loss)}, seconds=0.0,
                ))  # fmt: skip
                if step == steps:
                    break
                if gate.saves:
                    self.save(step)
                ruling = gate.ask(rung, keep_waiting=lambda: not self.is_asked_to_stop)
            if ruling is not None or self.is_asked_to_stop:
                if ruling is None or ruling.kind == "hold":
                    self.save(step)
                self.move("stopped", **({} if ruling is None else {"reason": ruling.reason}))
                return
        self.move("finished")

    def save(self, step: int) -> None:
        path = self.run.path / Area.CHECKPOINTS / f"step-{step:010d}"
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "toy.json", "{}")
        self.run.emit(sample(CheckpointSaved, step=step, path=f"checkpoints/{path.name}", bytes=1))


def main() -> None:
    run = open_run(Path(sys.argv[1]))
    with (run.path / "worker.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        ToyTrial(run).live()


if __name__ == "__main__":
    main()
