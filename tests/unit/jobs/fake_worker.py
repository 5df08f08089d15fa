"""A worker without torch: writes what a real one writes. Its fate is in the job's model.args."""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from yunlu.core.files import append_lines, write_atomically
from yunlu.core.processes import process_began_at, start_time
from yunlu.planning.plan import Plan
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    DataOpened,
    ErrorRaised,
    Evaluated,
    PlanMade,
    ProgressReported,
    StateChanged,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log, RunStore

PLAN = {
    "device": "cpu", "precision": "fp32", "batch": 32, "micro_batch": 32, "accumulation": 1,
    "steps": 20, "steps_per_epoch": 10, "warmup_steps": 1, "lr": 0.001, "weight_decay": 0.0,
    "evaluate_every": 10, "checkpoint_every": 10, "best_metric": "accuracy",
    "stopping_metric": "accuracy", "compile": "none", "workers": 0, "threads": 1,
    "choices": [{"name": "precision", "value": "fp32", "reason": "exact on this device"}],
    "prediction": {
        "memory_bytes": 2**28, "step_s": 0.01, "samples_per_s": 3200.0, "total_s": 4.0,
        "dollars": None,
    },
}  # fmt: skip


def main() -> int:
    run = open_run(Path(sys.argv[1]))
    fate = json.loads((run.path / Document.JOB).read_bytes())["model"]["args"].get("fate", "finish")
    if fate == "die at once":
        sys.stdout.write("a library is missing\n")
        return 3
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    with (run.path / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return live(run, fate, asked)


def live(run: RunStore, fate: str, asked: threading.Event) -> int:
    attempts = sum(isinstance(event, AttemptStarted) for event, _ in run.read_events())
    started_at = start_time()
    run.emit(
        AttemptStarted(
            number=attempts + 1,
            pid=os.getpid(),
            process_started_at=started_at,
            began_at=process_began_at(),
        )
    )
    run.emit(StateChanged(state="planning"))
    run.emit(ProgressReported(phase="loading data"))
    run.emit(DataOpened(source="synthetic:x", train=320, validation=40, test=40, fingerprint="f"))
    write_atomically(run.path / Document.PLAN, json.dumps(PLAN))
    run.emit(PlanMade(plan=Plan.model_validate(PLAN)))
    if "--plan-only" in sys.argv:
        run.emit(StateChanged(state="stopped", reason="only the plan was asked for"))
        return 0
    first = 11 if attempts else 1
    run.emit(StateChanged(state="running", **({"resumed_from_step": 10} if attempts else {})))
    train(run, first, 15 if fate in {"wait", "fail", "hang"} and not attempts else 20)
    if fate == "fail" and not attempts:
        hint, trace = "Lower train.optimizer.lr.", "Traceback: deep inside"
        run.emit(ErrorRaised(code="training", message="The loss is not finite at step 15.",
                 hint=hint, traceback=trace))  # fmt: skip
        run.emit(StateChanged(state="failed"))
        return 1
    if fate in {"wait", "hang"} and not attempts:
        asked.wait()
        run.emit(StateChanged(state="stopping", reason="asked to stop"))
        if fate == "hang":
            threading.Event().wait()
        run.emit(CheckpointSaved(step=15, path="checkpoints/step-15", bytes=10, seconds=0.1))
        run.emit(StateChanged(state="stopped"))
        return 0
    metrics = {"accuracy": 0.9}
    run.emit(Evaluated(split="test", step=20, loss=0.2, metrics=metrics, seconds=0.1))
    run.emit(StateChanged(state="finished"))
    return 0


def train(run: RunStore, first: int, last: int) -> None:
    for step in range(first, last + 1):
        record = {
            "step": step, "epoch": step / 10, "loss": 1 / step, "lr": 0.001, "samples": 32 * step,
            "at": time.time(), "attempt": 1 + (first > 1), "memory_bytes": 2**28, "grad_norm": 1.0, "items": 32,
        }  # fmt: skip
        append_lines(run.path / Log.METRICS, [record])
        if step == 10:
            data = {"split": "validation", "step": 10, "loss": 0.5, "seconds": 0.1}
            run.emit(Evaluated(**data, metrics={"accuracy": 0.8}))


if __name__ == "__main__":
    sys.exit(main())
