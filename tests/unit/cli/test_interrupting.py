"""Ctrl-C and SIGTERM end every command, whatever it is doing, with the processes that it started."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from yunlu.cli.main import main
from yunlu.client import local
from yunlu.jobs import calibration, lifecycle, plan_options
from yunlu.jobs.model_profile import ask_training

FAKE = Path(__file__).parents[1] / "jobs" / "fake_worker.py"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

both = pytest.mark.parametrize("number", list(CODES))


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch):
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", (sys.executable, str(FAKE)))


@pytest.fixture
def job_file(tmp_path):
    file = tmp_path / "digits.yaml"
    model = {"name": "mlp", "args": {"fate": "wait"}}
    search = {"space": {"train.optimizer.lr": [0.1, 0.2]}}
    file.write_text(
        f"task: tabular-classification\nmodel: {json.dumps(model)}\ndata: synthetic:x\n"
        f"search: {json.dumps(search)}\n"
    )
    return str(file)


def interrupt_in(monkeypatch, place, name, number):
    """Send the signal when the command comes to call this; what it calls then never ends by itself."""

    def hang(*_, **__):
        os.kill(os.getpid(), number)
        threading.Event().wait()

    monkeypatch.setattr(place, name, hang)


@both
@pytest.mark.parametrize(
    ("verb", "place", "name"),
    [
        ("plan", local.LocalJobs, "plan"),
        ("tune", local.LocalStudies, "tune"),
        ("submit", local.LocalPool, "submit"),
        ("validate", local.LocalJobs, "validate"),
        ("train", "yunlu.jobs.submitted_plan", "resolve_plan"),
    ],
)
def test_a_command_that_computes_ends(monkeypatch, job_file, number, *, verb, place, name):
    if isinstance(place, str):
        monkeypatch.setattr(f"{place}.{name}", lambda *_: None)
        place = sys.modules[place]
    before = signal.getsignal(signal.SIGTERM)
    interrupt_in(monkeypatch, place, name, number)
    assert main([verb, job_file]) == CODES[number]
    assert signal.getsignal(signal.SIGTERM) is before
    assert lifecycle.list_runs() == []


@both
def test_a_worker_that_measures_for_a_plan_ends_with_it(monkeypatch, job_file, number, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    workers = []
    start = lifecycle.start_worker

    def start_hanging(run, *_, **__):
        command = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1e6)")
        worker = start(run, command)
        workers.append(psutil.Process(worker.pid))
        wait_until(lambda: "here" in (run.path / "worker.log").read_text(), "it runs")
        os.kill(os.getpid(), number)
        return worker

    monkeypatch.setattr(lifecycle, "start_worker", start_hanging)
    assert main(["plan", job_file, "--measure"]) == CODES[number]


@both
def test_a_program_that_measures_a_model_or_the_machine_ends_with_the_command(
    monkeypatch, job_file, number
):
    tell = f"import os, signal, time; os.kill(os.getppid(), {int(number)}); time.sleep(1e6)"
    monkeypatch.setattr(
        plan_options, "find_shape", lambda *_: ask_training((sys.executable, "-c", tell), "")
    )
    assert main(["plan", job_file]) == CODES[number]
    monkeypatch.setattr(calibration, "_PROGRAM", (sys.executable, "-c", tell))
    assert main(["probe"]) == CODES[number]
    children = psutil.Process().children()
    wait_until(lambda: not any(tell in child.cmdline() for child in children if child.is_running()
               and child.status() != psutil.STATUS_ZOMBIE), "the programs are gone")  # fmt: skip


def test_a_run_that_was_just_started_is_not_left_alone(monkeypatch, job_file):
    start = lifecycle.start

    def start_and_press(run, *rest, **options):
        start(run, *rest, **options)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(lifecycle, "start", start_and_press)
    assert main(["train", job_file]) == 130
    wait_until(lambda: not lifecycle.list_runs()[0].state.is_active, "it was stopped")
    assert lifecycle.list_runs()[0].state.can_resume
