"""Every built-in tracker keeps the contract; what each adds of its own stands below it."""

from __future__ import annotations

import json
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from tests.waiting import LIMIT_S
from yunlu.core.errors import JobError, MissingPartError
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, RunStore
from yunlu.spec.job import Job
from yunlu.testing.trackers import Curves, TrackerContract
from yunlu.training.trackers.mlflow import MlflowTracker
from yunlu.training.trackers.tensorboard import TensorBoardTracker
from yunlu.training.trackers.tracker import TrackerThread, open_trackers
from yunlu.training.trackers.wandb import WandbTracker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.training.trackers.tracker import Tracker

JOB = Job.model_validate({"task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"})


class TestTensorBoard(TrackerContract):
    def make_tracker(self) -> TensorBoardTracker:
        return TensorBoardTracker()

    def read_back(self, run: RunStore) -> Curves:
        """Through TensorBoard's own reader, which also checks every checksum."""
        events = _accumulate(run)
        return {
            tag: {point.step: point.value for point in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
        }

    @pytest.mark.parametrize(
        ("second", "kept"), [(range(5, 7), [1, 2, 3, 4, 5, 6]), (range(1, 3), [1, 2])]
    )
    def test_steps_of_a_crashed_attempt_that_the_next_did_not_reach_are_gone(
        self, tmp_path: Path, second: range, kept: list[int]
    ) -> None:
        run = open_run(tmp_path)
        for steps in (range(1, 10), second):
            tracker = self.make_tracker()
            tracker.start(run, JOB, resumed=steps.start > 1)
            for step in steps:
                tracker.log({"loss": float(step)}, step=step)
            tracker.finish(state="stopped", summary={})
        points = _accumulate(run).Scalars("loss")
        assert [point.step for point in points] == kept

    def test_a_record_is_in_the_file_before_the_tracker_finishes(self, tmp_path: Path) -> None:
        run, tracker = open_run(tmp_path), self.make_tracker()
        _log_once(tracker, run)
        assert self.read_back(run) == {"loss": {1: 1.0}}
        tracker.finish(state="finished", summary={})

    def test_the_job_stands_beside_the_curves_without_its_secrets(self, tmp_path: Path) -> None:
        job = JOB.model_dump()
        job["data"] |= {
            "train": "s3://user:hunter2@bucket/x.csv",
            "options": {"secret": "hunter2", "client_kwargs": {"endpoint_url": "http://host"}},
        }
        run, tracker = open_run(tmp_path), self.make_tracker()
        tracker.start(run, Job.model_validate(job), resumed=False)
        tracker.log({"loss": 1.0}, step=1)
        tracker.finish(state="finished", summary={})
        text = _accumulate(run).Tensors("job/text_summary")[0].tensor_proto.string_val[0].decode()
        assert '"endpoint_url": "http://host"' in text
        assert "hunter2" not in text


def _accumulate(run: RunStore) -> Any:
    events = EventAccumulator(str(run.path / Area.TENSORBOARD))
    events.Reload()
    return events


# Its own sqlalchemy models warn of their own future.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.slow
class TestMlflow(TrackerContract):
    @pytest.fixture(autouse=True)
    def _local_store(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # One database for all: creating its tables takes seconds.
        base = tmp_path_factory.getbasetemp()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{base / 'mlflow.db'}")
        monkeypatch.setenv("DO_NOT_TRACK", "true")

    def make_tracker(self) -> MlflowTracker:
        return MlflowTracker()

    def read_back(self, run: RunStore) -> Curves:
        client = pytest.importorskip("mlflow").MlflowClient()  # slow to import
        run_id = json.loads((run.path / "mlflow.json").read_text())["run_id"]
        found = client.get_run(run_id)
        assert found.info.run_name == run.id
        return {
            name: {m.step: m.value for m in client.get_metric_history(run_id, name)}
            for name in found.data.metrics
        }


class TestWandb(TrackerContract):
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def make_tracker(self) -> WandbTracker:
        return WandbTracker()

    def read_back(self, run: RunStore) -> Curves:
        """From the transaction logs of every attempt, which must all belong to one W&B run."""
        wandb.teardown()  # as at the exit of a process: W&B's service has then written everything
        curves: Curves = {}
        logs = sorted(run.path.glob("trackers/wandb/offline-run-*/*.wandb"))
        assert len({log.name for log in logs}) == 1
        for log in logs:
            for record in _wandb_records(log.read_bytes()):
                if not record.HasField("history"):
                    continue
                values = {_key(item): item.value_json for item in record.history.item}
                step = int(json.loads(values.pop("_step", str(record.history.step.num))))
                for name, value in values.items():
                    curves.setdefault(name, {})[step] = json.loads(value)
        return curves


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _wandb_records(content: bytes) -> Iterator[Any]:
    """A W&B file is 7 bytes of header, then blocks of 32 KiB with records cut at their borders."""
    whole, middle_or_last = {1, 4}, {3, 4}
    offset, data = 7, b""
    while offset + 7 <= len(content):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        piece = content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        data = data + piece if kind in middle_or_last else piece
        if kind in whole:
            yield Record.FromString(data)


class Recorder:
    """A tracker that keeps what it was told; a gate can hold it back."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.entered = threading.Event()
        self.logged = threading.Semaphore(0)
        self._gate = gate

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        self.calls.append(("start", resumed))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.entered.set()
        if self._gate is not None:
            self._gate.wait()
        self.calls.append(("log", (step, metrics)))
        self.logged.release()

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        self.calls.append(("finish", state))

    @property
    def steps(self) -> list[int]:
        return [call[0] for name, call in self.calls if name == "log"]


class Broken(Recorder):
    def log(self, metrics: dict[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        raise ConnectionError("no route to https://me:hunter2@tracker.example")


class TestRecorder(TrackerContract):
    """The contract asks nothing of a tracker that cannot be read back but that it stands."""

    def make_tracker(self) -> Recorder:
        return Recorder()


class Forgetful(TensorBoardTracker):
    """Loses one step in three."""

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if step % 3:
            super().log(metrics, step=step)


def test_the_contract_catches_a_tracker_that_loses_metrics(tmp_path: Path) -> None:
    contract = type("Flawed", (TestTensorBoard,), {"make_tracker": lambda _: Forgetful()})()
    with pytest.raises(AssertionError, match="other steps"):
        contract.test_every_metric_logged_is_kept(tmp_path)


def test_everything_is_delivered_in_order_before_finish_returns(tmp_path: Path) -> None:
    recorder, warnings = Recorder(), []
    thread = TrackerThread([recorder], warnings.append)
    thread.start(open_run(tmp_path), JOB, resumed=True)
    for step in range(1, 2001):
        thread.log({"loss": 1.0}, step=step)
    thread.finish(state="finished", summary={})
    assert recorder.calls[0] == ("start", True)
    assert recorder.steps == list(range(1, 2001))
    assert recorder.calls[-1] == ("finish", "finished")
    assert warnings == []


def test_what_the_loop_changes_after_logging_does_not_reach_the_tracker(tmp_path: Path) -> None:
    gate = threading.Event()
    recorder = Recorder(gate)
    thread = TrackerThread([recorder], pytest.fail)
    metrics = {"loss": 1.0}
    thread.log(metrics, step=1)
    metrics["loss"] = 99.0
    gate.set()
    thread.finish(state="finished", summary={})
    assert recorder.calls[0] == ("log", (1, {"loss": 1.0}))


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    broken, good, warnings = Broken(), Recorder(), []
    thread = TrackerThread([broken, good], warnings.append)
    thread.start(open_run(tmp_path), JOB, resumed=False)
    for step in (1, 2, 3):
        thread.log({"loss": 1.0}, step=step)
    thread.finish(state="finished", summary={})
    assert broken.steps == [1]
    assert good.steps == [1, 2, 3]
    assert good.calls[-1] == ("finish", "finished")
    assert len(warnings) == 1
    assert "Broken failed" in warnings[0]
    assert "no route to https://***@tracker.example" in warnings[0]


def test_a_slow_tracker_loses_resolution_not_the_loop_nor_its_evaluations() -> None:
    gate, warnings = threading.Event(), []
    slow, quick = Recorder(gate), Recorder()
    thread = TrackerThread([slow, quick], warnings.append, capacity=16)
    thread.log({"loss": 0.0}, step=0)
    assert slow.entered.wait(LIMIT_S)  # it now holds step 0, so what follows is its backlog
    for step in range(1, 101):
        thread.log({"loss": 0.0}, step=step)
        if step == 50:
            thread.log({"accuracy": 1.0}, step=step)
        assert quick.logged.acquire(timeout=LIMIT_S)  # the quick one keeps up
    gate.set()
    thread.finish(state="finished", summary={})
    kept = slow.steps
    assert len(kept) <= 18
    assert kept == sorted(kept)
    assert kept[-1] == 100
    assert ("log", (50, {"accuracy": 1.0})) in slow.calls
    assert slow.calls[-1] == ("finish", "finished")
    assert len(quick.steps) == 102
    assert [w for w in warnings if "slower than training" in w] == warnings
    assert len(warnings) == 1


def test_a_tracker_that_hangs_does_not_keep_a_finished_run() -> None:
    gate, warnings = threading.Event(), []
    hanging, good = Recorder(gate), Recorder()
    thread = TrackerThread([hanging, good], warnings.append)
    thread.log({"loss": 1.0}, step=1)
    thread.log({"loss": 1.0}, step=2)
    assert hanging.entered.wait(LIMIT_S)
    thread.finish(state="finished", summary={}, timeout_s=2.0)  # the good one needs none of it
    assert warnings == ["Recorder did not finish in time; 2 records were not delivered."]
    assert good.calls[-1] == ("finish", "finished")
    thread.close(0.0)
    assert len(warnings) == 1
    gate.set()


def test_trackers_are_found_by_name_and_tensorboard_is_always_first() -> None:
    names = [type(tracker).__name__ for tracker in open_trackers(["wandb", "mlflow", "wandb"])]
    assert names == ["TensorBoardTracker", "WandbTracker", "MlflowTracker"]


def test_a_tracker_of_the_users_own_is_found_by_module_and_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tracker.py").write_text(
        "class Mine:\n"
        "    def start(self, run, job, *, resumed): ...\n"
        "    def log(self, metrics, *, step): ...\n"
        "    def finish(self, *, state, summary): ...\n"
        "class NotOne: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(open_trackers(["my_tracker:Mine"])[1]).__name__ == "Mine"
    with pytest.raises(JobError, match="is not a tracker"):
        open_trackers(["my_tracker:NotOne"])


def test_an_unknown_tracker_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(JobError, match="no tracker 'wandbb'") as caught:
        open_trackers(["wandbb"])
    assert "did you mean 'wandb'?" in str(caught.value)


@pytest.mark.parametrize(
    ("tracker", "package"),
    [(TensorBoardTracker, "tensorboard"), (WandbTracker, "wandb"), (MlflowTracker, "mlflow")],
)
def test_a_tracker_without_its_package_names_the_command_that_installs_it(
    tracker: type, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPartError, match=f"needs the package {package}") as caught:
        _log_once(tracker(), open_run(tmp_path))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith('pip install "yunlu[')


def _log_once(tracker: Tracker, run: RunStore) -> None:
    tracker.start(run, JOB, resumed=False)
    tracker.log({"loss": 1.0}, step=1)
