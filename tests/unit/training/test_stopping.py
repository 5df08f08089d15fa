"""A signal ends every phase of a run: at most one pass is finished, and nothing learnt is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.sample_events import EventT
from tests.waiting import wait_until
from yunlu.executors.worker_process import worker_lock_is_free
from yunlu.jobs import lifecycle
from yunlu.runs.events import CheckpointSaved, ErrorRaised, Evaluated, ProgressReported
from yunlu.runs.fold import read_view
from yunlu.runs.run_store import WORKER_LOG, Area, Document, RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training import engine, export
from yunlu.training.attempt import StopRequest, StopRequestedError, signals_as_stop
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.task import Batch, Splits
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


def events(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def exported(run: RunStore) -> dict[str, Tensor]:
    return load_file(run.path / Area.MODEL / "model.safetensors")


def points(count: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    )


class Signalled(ObjectTask):
    """Sends its own process a signal in the pass that ``when`` chooses, and counts the passes after it."""

    def __init__(self, *, number: int = signal.SIGTERM, data: Any = None) -> None:
        super().__init__(model=network(), data=points() if data is None else data)
        self.number = number
        self.phase = ""
        """What the run is doing: the signal is sent in the ``nth`` pass of it."""
        self.nth = 0
        self.in_phase = self.after = 0
        self.is_sent = False
        self.run: RunStore | None = None

    def watch(self, run: RunStore, phase: str, nth: int = 1) -> Signalled:
        """Send it in the ``nth`` pass of this phase."""
        self.run, self.phase, self.nth = run, phase, nth
        return self

    def _now(self, model: nn.Module) -> str:
        assert self.run is not None
        view = read_view(self.run)
        if view.state is not RunState.RUNNING:
            phases = events(self.run, ProgressReported)
            return phases[-1].phase if phases else ""
        if any(
            event.phase == "scoring the test data" for event in events(self.run, ProgressReported)
        ):
            return "test"
        return "train" if model.training else "evaluate"

    def send(self) -> None:
        """The signal, once."""
        if not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self.number)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        if self.is_sent:
            self.after += 1
        elif self.run is not None and self._now(model) == self.phase:
            self.in_phase += 1
            if self.in_phase == self.nth:
                self.send()
        return super().loss(model, batch)


STEPS: dict[str, Any] = {
    "epochs": 2, "batch": 18, "micro_batch": 3, "threads": 1, "trial_share": 0.0, "compile": False,
    "optimizer": {"name": "adamw", "kernel": "single"},
}  # fmt: skip


def is_stopped(run: RunStore) -> bool:
    assert events(run, ErrorRaised) == []
    return read_view(run).state is RunState.STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("phase", "nth"),
    [
        ("measuring and planning", 1),
        ("train", 2),  # halfway through the first step
        ("train", 9),
        ("evaluate", 2),
        ("test", 1),
    ],
)
def test_a_signal_in_any_pass_ends_the_run_and_a_resumed_one_is_as_if_undisturbed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, phase: str, nth: int, number: int
) -> None:
    monkeypatch.setattr(engine, "_LONG_STEP_S", 0.0)
    whole = make_run(**STEPS)
    assert live(whole.path, task=Signalled()) is RunState.FINISHED
    run = make_run(**STEPS)
    task = Signalled(number=number).watch(run, phase, nth)
    assert live(run.path, task=task) is RunState.STOPPED
    assert task.is_sent
    assert task.after == 0  # no pass was begun after it
    assert is_stopped(run)
    assert live(run.path, task=Signalled()) is RunState.FINISHED
    assert losses(run) == losses(whole)
    for name, weight in exported(whole).items():
        assert torch.equal(exported(run)[name], weight), name
    scores = [
        [(e.split, e.step, e.loss, e.rung) for e in events(r, Evaluated)] for r in (run, whole)
    ]
    assert scores[0] == scores[1]


def test_a_long_step_is_undone_and_a_short_one_finished(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threshold, lost in ((0.0, 1), (1e9, 0)):
        monkeypatch.setattr(engine, "_LONG_STEP_S", threshold)
        run = make_run(**STEPS)
        task = Signalled().watch(run, "train", nth=15)  # the third pass of the third step
        assert live(run.path, task=task) is RunState.STOPPED
        assert events(run, CheckpointSaved)[-1].step == 3 - lost
        assert task.after == (0 if lost else 3)


def test_a_signal_while_data_is_loaded_or_the_model_is_built_stops_the_run(
    make_run: MakeRun,
) -> None:
    class Preparing(Signalled):
        where = "load"

        def load(self, job: Job) -> Splits:
            if self.where == "load":
                self.send()
            return super().load(job)

        def build(self, job: Job) -> nn.Module:
            if self.where == "build":
                self.send()
            return super().build(job)

    for where, loaded in (("load", False), ("build", True)):
        run = make_run(**STEPS)
        task = Preparing()
        task.where = where
        assert live(run.path, task=task) is RunState.STOPPED
        assert is_stopped(run)
        assert bool(read_view(run).data) is loaded
        assert not run.has(Document.PLAN)
        assert live(run.path, task=Signalled()) is RunState.FINISHED


def test_a_signal_while_the_model_is_exported_leaves_no_half_model(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, task = export.save_file, Signalled()

    def send_and_save(*args: Any, **options: Any) -> None:
        task.send()
        save(*args, **options)

    monkeypatch.setattr(export, "save_file", send_and_save)
    run = make_run(**STEPS)
    assert live(run.path, task=task) is RunState.STOPPED
    assert is_stopped(run)
    assert not (run.path / Area.MODEL).exists()
    assert not list(run.path.glob(".model*"))
    assert live(run.path, task=Signalled()) is RunState.FINISHED
    assert (run.path / Area.MODEL / "model.safetensors").is_file()


def test_a_signal_while_a_checkpoint_is_saved_lets_it_be_saved(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yunlu.training.checkpoint.store import CheckpointStore

    save, sent = CheckpointStore.save, []

    def send_and_save(self: CheckpointStore, *args: Any, **options: Any) -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", send_and_save)
    run = make_run(**STEPS, checkpoint=3)
    assert live(run.path, task=Signalled()) is RunState.STOPPED
    steps = [event.step for event in events(run, CheckpointSaved)]
    assert steps[0] == 3
    assert steps[-1] <= 4  # at most one more step
    assert live(run.path, task=Signalled()) is RunState.FINISHED


STUCK = """
import hashlib
import time
from pathlib import Path

class Task:
    metric = "loss"

    def load(self, job):
        Path("loading").touch()
        if job.model.name == "stuck":  # one call, which no handler interrupts
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        while True:
            time.sleep(0.01)

    build = collate = loss = scorer = load
"""


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("stuck", {}),
        ("slow", {"devices": 2}),
        (
            "slow",
            {"devices": 2, "communication": {"method": "asynchronous", "guarantee": "relaxed"}},
        ),
    ],
    ids=["a call that never returns to Python", "a worker group", "asynchronous workers"],
)
def test_the_processes_of_a_run_end_while_they_load_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, parts: dict[str, Any]
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.chdir(tmp_path)
    named = {"task": "stuck.py:Task", "model": {"name": model}, "data": {"train": "nothing"}}
    run = lifecycle.submit(Job.model_validate({**named, **parts}))
    worker, log = lifecycle.start(run), run.path / WORKER_LOG
    wait_until(
        lambda: (tmp_path / "loading").exists() or not worker.is_alive(),
        "data is being loaded",
        explain=log.read_text,
    )
    assert (tmp_path / "loading").exists(), log.read_text()
    assert lifecycle.stop(run).state is RunState.STOPPED
    wait_until(lambda: worker_lock_is_free(run), "its worker is gone")


def test_only_work_that_may_be_abandoned_is_interrupted() -> None:
    with signals_as_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        with pytest.raises(StopRequestedError), stop.interrupting():
            raise AssertionError("not begun")
        os.kill(os.getpid(), signal.SIGTERM)
    done: list[str] = []

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            done.append("after")
        except Exception:  # noqa: BLE001 - a handler of failures does not take it
            done.append("failure")
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # does not disturb the cleaning up
            done.append("cleaned")

    with signals_as_stop() as stop, pytest.raises(StopRequestedError), stop.interrupting():
        interrupted()
    assert done == ["cleaned"]
    assert not StopRequest().is_set
