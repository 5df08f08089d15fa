"""``yunlu probe``: what it prints, without measuring; once the whole way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.planning.test_machine_profile import pace, probe
from tests.waiting import LIMIT_S
from yunlu.cli.main import main
from yunlu.jobs import calibration
from yunlu.planning.calibration import Calibration
from yunlu.planning.machine_profile import (
    FOLDER,
    DiskFigures,
    LinkFigures,
    StartFigures,
    dump_profiles,
    fit_message_time,
)

LINK = fit_message_time([1e3, 1e6], [1e-4, 1e-3])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def store(cache: Path, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "torch": metadata.version("torch"),
        "threads": 1,
        "host": socket.gethostname(),
        "paces": (pace(), pace("stream"), pace("convolution_back")),
        "link": LinkFigures(backend="gloo", all_reduce=LINK, send=LINK),
        "disk": DiskFigures(write_bytes_per_s=1e8, read_bytes_per_s=2e8),
        "start": StartFigures(torch_s=2.0, worker_s=3.0, cpu_s=1.5, resident_bytes=2e8),
    }
    (cache / FOLDER).mkdir(parents=True)
    stored = dump_profiles([probe(**(fields | changes))])
    (cache / FOLDER / f"{socket.gethostname()}.json").write_bytes(stored)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def forbid_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured, though there are figures")

    monkeypatch.setattr(calibration, "measure", refuse)


def test_nothing_stored_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--show"]) == 1
    assert "yunlu probe" in capsys.readouterr().err


def test_what_is_stored_is_shown_and_not_measured_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(own_cache)
    forbid_measuring(monkeypatch)
    assert main(["probe"]) == 0
    page = capsys.readouterr().out
    for words in ("matrix products", "all-reduce", "disk", "torch after 2.0 s", "no run yet"):
        assert words in page


def test_json_holds_every_figure_and_what_runs_taught(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(own_cache)
    forbid_measuring(monkeypatch)
    assert main(["probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["probed"]["disk"]["read_bytes_per_s"] == 2e8
    assert found["calibration"]["runs"] == 0
    assert main(["probe", "--forget", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"forgotten": 0}


def test_what_is_stored_is_shown_where_nothing_can_be_written(
    own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    store(own_cache)
    monkeypatch.setattr(calibration, "learn_from", lambda _: calibration._write(Calibration()))
    monkeypatch.setattr(calibration, "write_atomically", refuse)
    assert main(["probe", "--show"]) == 0
    assert "matrix products" in capsys.readouterr().out


def test_with_nothing_to_forget_there_is_nothing_to_fail(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_cache.write_text("a file where the folder should be")
    assert main(["probe", "--forget"]) == 0
    assert "0 deleted runs forgotten" in capsys.readouterr().out
    assert main(["probe", "--forget", "--all"]) == 0
    assert "0 runs and every probe forgotten" in capsys.readouterr().out
    assert main(["probe", "--all"]) == 1


@pytest.mark.parametrize("why", ["afresh", "quick", "threads", "torch"])
def test_it_measures_when_asked_to_or_when_the_figures_are_not_of_this_torch_and_threads(
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    why: str,
) -> None:
    changes: dict[str, Any] = {
        "quick": {"is_quick": True},
        "threads": {"paces": (pace(threads=5),)},
        "torch": {"torch": "0.1"},
    }
    store(own_cache, **changes.get(why, {}))
    monkeypatch.setattr(calibration, "measure", lambda _: probe(device="measured anew"))
    assert main(["probe", *(["--afresh"] if why == "afresh" else [])]) == 0
    assert "measured anew" in capsys.readouterr().out


def test_a_measurement_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; sys.exit('no memory left to measure')"
    monkeypatch.setattr(calibration, "_PROGRAM", (sys.executable, "-c", script))
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    assert "no memory left to measure" in said
    assert "yunlu doctor" in said


def test_the_measuring_processs_lines_become_a_bar_and_then_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [{"part": "matrix products", "index": 0, "of": 2}]
    lines.append({"probed": probe(device="told").model_dump(mode="json")})
    said = tmp_path / "said.jsonl"
    said.write_text("a warning of some library\n" + "".join(json.dumps(e) + "\n" for e in lines))
    script = f"print(open({str(said)!r}).read())"
    monkeypatch.setattr(calibration, "_PROGRAM", (sys.executable, "-c", script))
    assert main(["probe"]) == 0
    assert "told (4 cores)" in capsys.readouterr().out


_BY_COMMAND = """
import sys; from yunlu.jobs import calibration
calibration._PROGRAM = (sys.executable, "-c", {inner!r})
for message in calibration._read_messages():
    print(message["pid"], flush=True)
"""
_BY_PROBE = """
import json, sys; from yunlu.core.processes import piped_process
with piped_process([sys.executable, "-c", {inner!r}]) as child:
    print(json.loads(child.stdout.readline())["pid"], flush=True); child.wait()
"""


@pytest.mark.parametrize("starter", [_BY_COMMAND, _BY_PROBE], ids=["command", "probe"])
def test_who_measures_ends_with_whoever_asked_even_if_that_is_killed(starter: str) -> None:
    inner = "import json,os,time; from yunlu.core.processes import end_with_parent as e; "
    inner += "e(); print(json.dumps({'pid': os.getpid()}), flush=True); time.sleep(600)"
    outer = starter.format(inner=inner)
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        measuring = psutil.Process(int(process.stdout.readline()))
        process.kill()
    try:
        measuring.wait(LIMIT_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            measuring.kill()
