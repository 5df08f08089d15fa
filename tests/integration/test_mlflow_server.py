"""MLflow over HTTP, against a real server on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import LIMIT_S, wait_until
from yunlu.core.settings import worker_environment
from yunlu.runs.home import open_run
from yunlu.spec.job import Job
from yunlu.training.trackers.mlflow import MlflowTracker
from yunlu.training.trackers.tracker import TrackerThread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = Job.model_validate(
    {
        "task": "tabular-classification",
        "model": {"name": "mlp", "args": {"note": "x" * 9000}},
        "data": "sklearn:iris",
        "train": {"batch": 48},
    }
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--backend-store-uri", f"sqlite:///{directory}/mlflow.db"),
                *("--default-artifact-root", str(directory / "artifacts")),
            ],
            cwd=directory,
            env=worker_environment() | {"DO_NOT_TRACK": "true"},
            stdout=log,
            stderr=log,
            start_new_session=True,  # its web workers end with it
        )
    try:
        _wait_until_up(address, process, directory / "server.log")
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=30):
                return True
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
            return False

    wait_until(is_up, "the server answers", explain=lambda: log.read_text()[-2000:], pause_s=0.2)


@pytest.mark.long
def test_a_run_and_its_resumed_life_are_one_mlflow_run_with_every_metric(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    run, warnings = open_run(tmp_path / "digits-1"), []
    run.path.mkdir()
    for resumed, steps, state in (
        (False, range(1, 1301), "stopped"),
        (True, range(1251, 1501), "finished"),
    ):
        thread = TrackerThread([MlflowTracker()], warnings.append)
        thread.start(run, JOB, resumed=resumed)
        for step in steps:
            thread.log({"train/loss": 1 / step, "train/lr": 0.1}, step=step)
        thread.finish(state=state, summary={"test": {"accuracy": 0.9}}, timeout_s=LIMIT_S)
    assert warnings == []

    known = json.loads((run.path / "mlflow.json").read_text())
    assert known["uri"] == server
    found = _get(server, "runs/get", run_id=known["run_id"])["run"]
    assert found["info"]["run_name"] == "digits-1"
    assert found["info"]["status"] == "FINISHED"
    params = {param["key"]: param["value"] for param in found["data"]["params"]}
    assert params["train.batch"] == "48"
    assert params["train.optimizer.name"] == "adamw"
    assert params["model.args.note"].startswith("xxx")
    tags = {tag["key"]: tag["value"] for tag in found["data"]["tags"]}
    assert tags["yunlu.test.accuracy"] == "0.9"
    history = _get(server, "metrics/get-history", run_id=known["run_id"], metric_key="train/loss")[
        "metrics"
    ]
    assert {int(point["step"]): point["value"] for point in history} == {
        step: 1 / step for step in range(1, 1501)
    }


@pytest.mark.slow
def test_an_mlflow_run_deleted_meanwhile_is_replaced_by_a_new_one(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    run = open_run(tmp_path / "digits-2")
    run.path.mkdir()
    (run.path / "mlflow.json").write_text(json.dumps({"uri": server, "run_id": "f" * 32}))
    tracker = MlflowTracker()
    tracker.start(run, JOB, resumed=True)
    tracker.log({"train/loss": 0.5}, step=3)
    tracker.finish(state="failed", summary={})
    made = json.loads((run.path / "mlflow.json").read_text())["run_id"]
    assert made != "f" * 32
    assert _get(server, "runs/get", run_id=made)["run"]["info"]["status"] == "FAILED"


def _get(server: str, call: str, **query: str) -> Any:
    address = f"{server}/api/2.0/mlflow/{call}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        return json.load(answer)
