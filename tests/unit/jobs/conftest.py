import sys
from pathlib import Path

import pytest

from yunlu.spec.job import Job

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@pytest.fixture
def fake_worker(monkeypatch):
    """Runs are worked on by a program that writes what a worker writes, without torch."""
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", FAKE_WORKER)


@pytest.fixture
def make_job():
    def make(fate="finish", **parts):
        model = {"name": "mlp", "args": {"fate": fate}}
        given = {"name": "digits", "task": "tabular-classification", "data": "synthetic:x"}
        return Job.model_validate({**given, "model": model, **parts})

    return make
