"""What ``yunlu.train`` shows, in a script and in a real kernel; runs are a fake worker's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import yunlu
from tests.kernel import kernel
from tests.unit.client.test_api import FAKE_WORKER, job
from tests.waiting import wait_until
from yunlu.core.errors import TrainingError
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kernel import Cell

SETUP = f"""
import sys, yunlu
from yunlu.executors import worker_process
worker_process.WORKER = {FAKE_WORKER!r}

def job(fate="finish"):
    model = {{"name": "mlp", "args": {{"fate": fate}}}}
    parts = {{"task": "tabular-classification", "data": "synthetic:x", "model": model}}
    return yunlu.Job.model_validate({{"name": "digits", **parts}})
"""


@pytest.fixture
def _fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", FAKE_WORKER)


def stopped_run() -> yunlu.Run:
    run = yunlu.train(job("wait"), wait=False)
    wait_until(lambda: len(run.history()) == 15, "it waits after step 15")
    return run.stop()


@pytest.mark.usefixtures("_fake_worker")
def test_a_script_shows_plan_progress_and_result_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = yunlu.train(job())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert run.id in shown.err
    for part in ("precision", "exact on this device", "predicted", "step 20/20", "accuracy 0.9"):
        assert part in shown.err
    assert "finished  accuracy 90.00 %" in shown.err
    assert "\x1b" not in shown.err  # no terminal: plain lines


@pytest.mark.usefixtures("_fake_worker")
def test_without_progress_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    run = yunlu.train(job(), progress=False)
    stopped = stopped_run()
    yunlu.resume(stopped.id, progress=False)
    assert run.state is stopped.state is RunState.FINISHED
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_fake_worker")
def test_a_resumed_run_is_shown_from_its_new_attempt_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped = stopped_run()
    yunlu.resume(stopped.id)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "from the checkpoint of step 10" in shown.err
    assert "step 15/20" not in shown.err


@pytest.mark.usefixtures("_fake_worker")
def test_a_failed_run_shows_its_end_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="not finite at step 15"):
        yunlu.train(job("fail"))
    assert "failed" in capsys.readouterr().err


def blocks(cell: Cell) -> list[str]:
    return [data["text/html"] for data in cell.displays.values()]


@pytest.mark.slow
def test_a_notebook_shows_a_live_block_that_stays(tmp_path: Path) -> None:
    with kernel(tmp_path) as notebook:
        assert notebook.run(SETUP).error == ""
        _check_live_block(notebook.run("run = yunlu.train(job())"))
        silent = notebook.run("yunlu.train(job(), progress=False); None")
        assert (silent.out, silent.err, silent.updates, silent.error) == ("", "", [], "")
        again = notebook.run("run").result
        assert 'class="yunlu-run finished"' in again["text/html"]
        assert again["text/plain"].startswith("Run('digits-")
        page = notebook.run("run.report()").result["text/html"]
        assert page.startswith("<iframe srcdoc=")
        assert 'sandbox="allow-scripts"' in page
        failed = notebook.run("yunlu.train(job('fail'))")
        assert failed.error.startswith("TrainingError: The loss is not finite")
        assert 'class="yunlu-run failed"' in blocks(failed)[0]
        assert "Lower train.optimizer.lr." in blocks(failed)[0]
        stopped = notebook.run("yunlu.train(job('wait'))", watch=_is_at_step_15)
        assert stopped.error.startswith("KeyboardInterrupt")
        assert 'class="yunlu-run stopped"' in blocks(stopped)[0]
        assert "stopping: saving a checkpoint" in stopped.err
        resumed = notebook.run("run = yunlu.resume('last'); run.state")
        assert "finished" in resumed.result["text/plain"]
        assert (
            "torch"
            not in notebook.run("'torch' if 'torch' in sys.modules else ''").result["text/plain"]
        )


def _check_live_block(cell: Cell) -> None:
    assert (cell.out, cell.err, cell.error) == ("", "", "")
    (block,) = blocks(cell)
    assert 'class="yunlu-run finished"' in block
    assert 'aria-valuenow="100"' in block
    assert block.count('class="chart"') == 1  # one evaluation makes no curve of its own
    assert "step 20/20" in block
    assert "90.00 %" in block
    assert "exact on this device" in block
    states = [re.search(r'class="yunlu-run (\w+)"', data["text/html"]) for data in cell.updates]
    assert len(states) > 1
    assert states[0] is not None
    assert states[0][1] != "finished"
    assert all("finished" in data["text/plain"] for data in cell.displays.values())


def _is_at_step_15(cell: Cell) -> bool:
    return any("step 15/20" in block for block in blocks(cell))
