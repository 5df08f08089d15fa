"""``yunlu tune`` and ``yunlu study`` as a person uses them: search, interrupt, go on, look; and Optuna's
dashboard on the same storage. Trials are toys in real processes."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import ROOT, Answer
from tests.integration.toy_study import toy_job
from tests.integration.toy_tune import find_toys, refuse_plan
from tests.waiting import LIMIT_S, wait_until
from yunlu.cli.main import main
from yunlu.tuning import forecast
from yunlu.tuning.study_runner import slots

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TOY = Path(__file__).with_name("toy_tune.py")
DASHBOARD = shutil.which("optuna-dashboard") or shutil.which(
    "optuna-dashboard", path=str(Path(sys.executable).parent)
)

Tune = Callable[..., Answer]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "toys.yaml"
    mapping = toy_job(args={"step_s": 0.01}).model_dump(mode="json", exclude_unset=True)
    path.write_text(yaml.safe_dump({**mapping, "name": None}))
    return path


@pytest.fixture
def tune(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Tune:
    """The command in this process, which has imported it already; its trials are toys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slots, "find_slots", find_toys)
    monkeypatch.setattr(forecast, "plan_alone", refuse_plan)

    def call(*words: str | Path) -> Answer:
        capsys.readouterr()
        code = main(["tune", *map(str, words)])
        shown = capsys.readouterr()
        return Answer(code, shown.out, shown.err)

    return call


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_search_ends_with_a_setting_a_command_and_a_page(
    job: Path, tune: Tune, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tune(job, "--trials", "3", "--set", "train.seed=7")
    assert answer.code == 0, answer.err
    for words in ("forecast", "trials", "begins", "rung 4/4", "done", "best  loss", "predicted"):
        assert words in answer.out
    assert f"yunlu train {job} --set train.seed=7" in " ".join(
        answer.out.replace("\\\n", "").split()
    )
    assert (own_home / "studies" / "toys" / "report.html").is_file()
    told = document(capsys, "study", "show", "toys")
    assert [each["state"] for each in told["trials"]] == ["done"] * 3
    best = document(capsys, "study", "best")
    assert best["value"] == min(each["value"] for each in told["trials"])
    assert str(best["params"]["train.optimizer.lr"]) in best["command"]
    assert main(["study", "show", "toys", "--all"]) == 0
    assert main(["study", "list"]) == 0
    assert "toys" in capsys.readouterr().out


@pytest.mark.long
def test_ctrl_c_lets_it_rest_and_the_same_command_goes_on(
    job: Path,
    tune: Tune,
    own_home: Path,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (str(job), "--trials", "3", "--set", "model.args.step_s=0.1")
    process = subprocess.Popen(
        [sys.executable, str(TOY), "tune", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=job.parent,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        seen: list[str] = []
        while "rung 1/4" not in (seen[-1] if seen else ""):
            line = process.stdout.readline()
            assert line, f"it ended early: {''.join(seen)}"
            seen.append(line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert "stopping: trials save and hold" in out
    assert "resume with: yunlu tune --resume toys" in out
    told = document(capsys, "study", "show", "toys")
    assert told["state"] == "stopped"
    held = [each for each in told["trials"] if each["state"] == "held"]
    assert held
    answer = tune(*words)
    assert answer.code == 0, answer.err
    assert "continues after" in answer.out
    again = document(capsys, "study", "show", "toys")
    assert [each["state"] for each in again["trials"]] == ["done"] * 3
    for before in held:  # the very runs, from where they were
        after = again["trials"][before["number"]]
        assert after["run"] == before["run"]
        assert after["curve"][: len(before["curve"])] == before["curve"]
    assert len(list(own_home.glob("*/trial.json"))) == 3


@pytest.mark.long
def test_a_study_can_be_stopped_from_elsewhere(
    job: Path, tune: Tune, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def stop_it() -> None:
        wait_until(lambda: len(list(own_home.glob("*/trial.json"))) > 1, "a trial")
        codes.append(main(["study", "stop", "toys"]))

    other = threading.Thread(target=stop_it)
    other.start()
    answer = tune(job, "--trials", "3", "--set", "model.args.step_s=0.2")
    other.join()
    assert codes == [0]
    assert answer.code == 0
    assert "toys is stopped; resume with: yunlu tune --resume toys" in answer.out
    assert document(capsys, "study", "show", "toys")["state"] == "stopped"
    assert main(["study", "stop", "toys"]) == 0
    assert "is not running" in capsys.readouterr().out


@pytest.mark.long
def test_a_finished_study_goes_on_only_where_more_is_asked_for(
    job: Path, tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tune(job, "--trials", "2", "--stop", "median", "--json")
    assert answer.code == 0, answer.err
    told = json.loads(answer.out)  # all that it prints
    assert told["stop"] == "median"
    assert told["forecast"]["trials"]["value"] == len(told["trials"]) == 2
    over = tune("--resume", "toys")
    assert over.code == 1
    assert "toys is finished" in over.err
    bad = tune("--resume", "toys", "--trials", "-4")
    assert bad.code == 1
    assert "expected a whole number above 0, got -4" in bad.err
    assert tune("--resume", "toys", "--trials", "3", "--json").code == 0
    assert len(document(capsys, "study", "show", "toys")["trials"]) == 3


@pytest.mark.long
def test_trials_that_fail_alike_end_the_search_with_the_error_told_once(
    job: Path, tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tune(job, "--trials", "30", "--set", "model.args.fails=true")
    assert answer.code == 1
    assert answer.err.count("is not to my liking") == 1
    assert "Traceback" not in answer.err + answer.out
    told = document(capsys, "study", "show", "toys")
    assert told["state"] == "failed"
    assert len(told["trials"]) < 8
    assert main(["study", "best", "toys"]) == 1
    assert "no trial of toys has a value yet" in capsys.readouterr().err
    assert main(["study", "report", "toys"]) == 0


@pytest.mark.skipif(DASHBOARD is None, reason="optuna-dashboard is not installed")
def test_optunas_dashboard_reads_the_same_storage(
    job: Path, tune: Tune, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert DASHBOARD is not None
    assert tune(job, "--trials", "3", "--method", "random", "--stop", "asha", "--json").code == 0
    told = document(capsys, "study", "show", "toys")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [DASHBOARD, told["storage"], "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        address = f"http://127.0.0.1:{port}/api/studies"
        answers: list[Any] = []

        def is_up() -> bool:
            assert server.poll() is None, "the dashboard ended"
            try:
                answers.append(_get(address))
            except OSError:
                return False
            return True

        wait_until(is_up, "the dashboard's answer")
        (study,) = answers[-1]["study_summaries"]
        assert study["study_name"] == "toys"
        assert study["directions"] == ["minimize"]
        detail = _get(f"{address}/{study['study_id']}")
        assert len(detail["trials"]) == 3
        states = {"done": "Complete", "pruned": "Pruned", "held": "Running", "failed": "Fail"}
        for shown, own in zip(detail["trials"], told["trials"], strict=True):
            assert shown["state"] == states[own["state"]]
            values = [(each["step"], each["value"]) for each in shown["intermediate_values"]]
            assert [[step, pytest.approx(value)] for step, value in values] == own["curve"]
            (rate,) = [each for each in shown["params"] if each["name"] == "train.optimizer.lr"]
            assert float(rate["param_internal_value"]) == own["params"]["train.optimizer.lr"]
            attributes = {each["key"]: each["value"] for each in shown["user_attrs"]}
            assert attributes["run"] == own["run"]
    finally:
        server.terminate()
        server.wait(timeout=LIMIT_S)


def _get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.loads(answer.read())
