"""Whatever a run, a study or a job file holds: no verb lets it steer the terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from tests.unit.security.hostile import (
    ALL,
    PAYLOADS,
    SURROGATE,
    control_sequences,
    hostile_events,
    make_hostile_run,
)
from yunlu.cli.main import main
from yunlu.core.errors import DataError
from yunlu.jobs.run_log import MetricRecord
from yunlu.render.terminal.page import TerminalConsole
from yunlu.render.terminal.run_display import JsonDisplay, LiveDisplay, PlainDisplay
from yunlu.runs.events import UnknownEvent, parse_event

RUN = "evil-000000"
READING = {
    "ps": ["ps"],
    "ps all": ["ps", "--all"],
    "show": ["show", RUN],
    "logs": ["logs", RUN],
    "logs of a rank": ["logs", RUN, "--rank", "1"],
    "logs of a worker": ["logs", RUN, "--worker", "0"],
    "report": ["report", RUN],
    "pool": ["pool", "--once"],
    "pool why": ["pool", "why", RUN],
    "study": ["study"],
    "resume": ["resume", RUN],
    "resize": ["resize", RUN, "--devices", "2"],
    "finetune": ["finetune", RUN, "job.yaml"],
    "debug": ["logs", RUN, "--rank", "9", "--debug"],
}
JSON = {
    "ps": ["ps", "--json"],
    "show": ["show", RUN, "--json"],
    "report": ["report", RUN, "--json"],
    "pool": ["pool", "--json"],
}


@pytest.fixture(params=["plain", "coloured"])
def coloured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_coloured = request.param == "coloured"
    monkeypatch.setenv("COLUMNS", "200")
    if is_coloured:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    return is_coloured


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) in {0, 1}, capsys.readouterr().err
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("verb", READING)
@pytest.mark.parametrize("ends", ["failed", "finished", "stopped"])
def test_no_stored_text_steers_the_terminal(
    verb: str, ends: str, coloured: bool, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, ALL, ends=ends)
    text = printed(READING[verb], capsys)
    assert text.strip()
    assert control_sequences(text, colours=coloured) == set()
    assert "\x1b]8" not in text


@pytest.mark.parametrize("verb", JSON)
def test_json_of_stored_text_is_whole_and_steers_nothing(
    verb: str, coloured: bool, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, ALL)
    text = printed(JSON[verb], capsys)
    assert control_sequences(text, colours=False) == set()
    for line in text.splitlines():
        json.loads(line)
    if verb == "ps":
        assert json.loads(text)["model"] == ALL


@pytest.mark.parametrize("verb", ["ps", "show", "logs", "report"])
def test_lone_surrogates_end_no_verb(
    verb: str, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_hostile_run(own_home, "fine")
    job = json.loads((path / "job.json").read_text())
    event = {"v": 1, "kind": "warning", "at": 2.0, "message": SURROGATE}
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (path / "job.json").write_text(json.dumps(job | {"note": SURROGATE}))
    assert control_sequences(printed([verb] if verb == "ps" else [verb, RUN], capsys)) == set()


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc", "..", "x\x1b]0;owned\x07", "[/bold]", "a\rb"]
)
@pytest.mark.parametrize("verb", ["show", "logs", "report", "stop", "resume"])
def test_a_hostile_name_of_a_run_is_refused_in_harmless_words(
    name: str, verb: str, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, "fine")
    assert main([verb, name]) == 1
    assert control_sequences("".join(capsys.readouterr())) == set()


def test_names_of_directories_are_shown_harmlessly(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a\x1b]0;x\x07-000000", "b[link=evil]-000000", "c[bold]-000000", "d\u202e-000000"]
    for name in names:
        make_hostile_run(own_home, "fine", name=name)
    text = printed(["ps"], capsys)
    assert "b[link=evil]-000000" in text
    assert "c[bold]-000000" in text
    assert control_sequences(text) == set()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_job_file_is_described_without_control_sequences(
    payload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAYLOADS[payload]
    (tmp_path / "data.txt").write_text("x")
    job = {"task": "text-classification", "model": text, "data": {"train": text, "target": text}}
    file = tmp_path / "job.yaml"
    for content in (job, job | {"task": text}, job | {text: 1}, job | {"train": {text: text}}):
        file.write_text(json.dumps(content))
        for more in ([], ["--json"], ["--set", f"model={text}"], ["--set", text]):
            code = main(["validate", str(file), *more])
            assert code in {0, 1}
            shown = "".join(capsys.readouterr())
            assert shown
            assert control_sequences(shown, colours=False) == set()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_error_about_a_column_does_not_steer(
    payload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise DataError(f"no column 'y', known: {PAYLOADS[payload]}", hint=PAYLOADS[payload])

    monkeypatch.setattr("yunlu.cli.runs.default_client", fail)
    for words in (["ps"], ["ps", "--debug"]):
        assert main(words) == 1
        assert control_sequences("".join(capsys.readouterr()), colours=False) == set()


def test_colours_of_a_log_stay_but_its_links_and_moves_go(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    path = make_hostile_run(own_home, "fine")
    link = PAYLOADS["OSC 8 link"]
    (path / "worker.log").write_text(f"\x1b[31mred\x1b[0m {link} \x1b[2Jgone\n")
    text = printed(["logs", RUN], capsys)
    assert "\x1b[31mred" in text
    assert control_sequences(text) == set()
    assert "evil.example" not in text


@pytest.mark.parametrize("display", [LiveDisplay, PlainDisplay, JsonDisplay])
def test_the_display_of_a_training_run_is_not_steered(display: type) -> None:
    out = io.StringIO()
    console = TerminalConsole(file=out, width=200, force_terminal=display is LiveDisplay)
    shown = JsonDisplay(RUN, out) if display is JsonDisplay else display(console)
    for record in hostile_events(ALL):
        event = parse_event(record)
        assert event is not None
        assert not isinstance(event, UnknownEvent), event.problem
        shown.show(event)
    metrics = {"step": 1, "at": 2.0, "loss": 1.0, ALL: 1.0}
    shown.show(MetricRecord(record=metrics))
    shown.close()
    text = re.sub(r"\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r", "", out.getvalue())  # moves of Rich
    assert text
    assert control_sequences(text) == set()


def test_strings_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalConsole(width=80).print("[bold]x[/] [link=http://evil]y[/link] :smile:")
    assert capsys.readouterr().out == "[bold]x[/] [link=http://evil]y[/link] :smile:\n"
