"""``yunlu probe``: what it prints, without measuring; once the whole way."""

from __future__ import annotations

import json
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planning.test_probed import pace, probe
from yunlu.cli import probe as verb
from yunlu.cli.main import main
from yunlu.planning.probed import (
    FOLDER,
    DiskFigures,
    LinkFigures,
    StartFigures,
    dump_probes,
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
        "host": socket.gethostname(),
        "paces": (pace(), pace("stream"), pace("convolution_back")),
        "link": LinkFigures(backend="gloo", all_reduce=LINK, send=LINK),
        "disk": DiskFigures(write_bytes_per_s=1e8, read_bytes_per_s=2e8),
        "start": StartFigures(torch_s=2.0, worker_s=3.0, cpu_s=1.5, resident_bytes=2e8),
    }
    (cache / FOLDER).mkdir(parents=True)
    stored = dump_probes([probe(**(fields | changes))])
    (cache / FOLDER / f"{socket.gethostname()}.json").write_bytes(stored)


def forbid_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured, though there are figures")

    monkeypatch.setattr(verb, "measure", refuse)


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


@pytest.mark.parametrize("why", ["afresh", "quick"])
def test_it_measures_when_asked_to_or_when_the_figures_were_taken_in_a_hurry(
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    why: str,
) -> None:
    store(own_cache, is_quick=why == "quick")
    monkeypatch.setattr(verb, "measure", lambda _: probe(device="measured anew"))
    assert main(["probe", *(["--afresh"] if why == "afresh" else [])]) == 0
    assert "measured anew" in capsys.readouterr().out


def test_a_measurement_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; sys.exit('no memory left to measure')"
    monkeypatch.setattr(verb, "_PROGRAM", (verb.sys.executable, "-c", script))
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    assert "no memory left to measure" in said
    assert "yunlu doctor" in said


def test_the_measuring_processs_lines_become_a_bar_and_then_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [{"part": "matrix products", "place": 0, "of": 2}]
    lines.append({"probed": probe(device="told").model_dump(mode="json")})
    said = tmp_path / "said.jsonl"
    said.write_text("a warning of some library\n" + "".join(json.dumps(e) + "\n" for e in lines))
    script = f"print(open({str(said)!r}).read())"
    monkeypatch.setattr(verb, "_PROGRAM", (verb.sys.executable, "-c", script))
    assert main(["probe"]) == 0
    assert "told (4 cores)" in capsys.readouterr().out
