"""``yunlu tune`` and ``yunlu study`` in the terminal: tables, lines, and what is refused."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tests.unit.tuning.made_studies import (
    BEGAN_AT,
    make_living,
    make_pareto,
    make_study,
    replace,
    with_trials,
)
from yunlu.cli.main import main
from yunlu.planning.plan import Interval
from yunlu.render.format import show_dollars, train_command
from yunlu.render.study_report import dump_study
from yunlu.render.terminal.page import TerminalConsole, to_json
from yunlu.render.terminal.study_tables import (
    LiveStudy,
    PlainStudy,
    answer_block,
    choose_rows,
    comparison_block,
    failure_lines,
    forecast_block,
    print_block,
    studies_table,
    study_page,
)
from yunlu.tuning import forecast
from yunlu.tuning.forecast import TrialTime
from yunlu.tuning.values import Point, TrialState

HOME = Path("home/studies/digits-search")
JOB = """
task: image-classification
model: cnn
data: sklearn:digits
"""
SEARCH = "search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}}\n"


def block_text(block: RenderableType, width: int = 140) -> str:
    console = TerminalConsole(file=io.StringIO(), width=width)
    print_block(console, block)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + SEARCH)
    return path


def test_the_page_has_trials_best_first_and_where_the_study_stands() -> None:
    view = make_living(HOME)
    assert view.best is not None
    page = block_text(study_page(view, now=BEGAN_AT + 500, width=138))
    rows = [line.split() for line in page.splitlines()[4:]]
    assert rows[0][0] == str(view.best.number)
    assert "running" in page.splitlines()[0]
    for words in ("2 running", "1 held", "1 failed", "8 min 20 s", "$1.28 of $5.00", "24 of 24"):
        assert words in page
    assert f"(trial {view.best.number})" in page
    assert all(line == line.rstrip() for line in page.splitlines())


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_fields_that_do_not_fit_are_named_and_nothing_is_cut(width: int) -> None:
    page = block_text(study_page(make_living(HOME), now=BEGAN_AT + 500, width=width - 2), width)
    assert max(map(len, page.splitlines())) <= width
    assert "lr" in page.splitlines()[2]
    table = page.split("more:")[0]
    assert width < 80 or "…" not in table
    assert ("not shown: " in page) is (width < 110)


@pytest.mark.parametrize("rows", [2, 5, 12, 24, 100, None])
def test_a_small_screen_keeps_the_best_and_those_that_run(rows: int | None) -> None:
    view = make_living(HOME)
    assert view.best is not None
    shown = choose_rows(view, rows)
    assert len(shown) == min(rows or 24, 24)
    numbers = [each.number for each in shown]
    assert numbers[0] == view.best.number
    running = sum(each.state is TrialState.RUNNING for each in shown)
    assert running == min(2, (rows or 24) // 2)
    page = block_text(study_page(view, now=BEGAN_AT, width=138, rows=rows))
    assert ("more: yunlu study show" in page) is (len(shown) < 24)


def test_a_study_without_trials_has_a_page() -> None:
    page = block_text(study_page(make_study(HOME, 0), now=BEGAN_AT, width=100))
    assert "no trial has begun" in page
    assert "no trial has a value yet" in block_text(answer_block(make_study(HOME, 0), now=BEGAN_AT))


def test_the_answer_is_a_setting_a_command_and_the_forecast(tmp_path: Path) -> None:
    home = tmp_path / "studies" / "digits-search"
    view = make_study(home)
    assert view.best is not None
    assert view.best.run is not None
    answer = block_text(answer_block(view, now=BEGAN_AT), 80)
    shown = answer[answer.index("yunlu train") : answer.index(" run ")]
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(train_command(view, view.best))
    answer = block_text(answer_block(view, now=BEGAN_AT), 400)
    assert f"run     {tmp_path / view.best.run}" in answer
    assert "predicted" in answer
    assert "yunlu resume" not in answer
    held = replace(view.best, trial=replace(view.best.trial, state=TrialState.HELD))
    unfinished = block_text(answer_block(replace(view, best=held), now=BEGAN_AT))
    assert f"finish  yunlu resume {view.best.run}\n" in unfinished
    (tmp_path / view.best.run / "model").mkdir(parents=True)
    assert f"model   {tmp_path / view.best.run / 'model'}" in block_text(
        answer_block(view, now=0), 400
    )


def test_several_objectives_show_their_front() -> None:
    view = make_pareto(HOME)
    answer = block_text(answer_block(view, now=BEGAN_AT))
    assert "nothing beats" in answer
    assert answer.count("trial ") >= len(view.front)


def test_a_forecast_tells_value_and_interval() -> None:
    view = make_study(HOME)
    assert view.forecast is not None
    block = block_text(forecast_block({**view.forecast, "notes": ["as the probe says"]}))
    for words in ("40", "31–52", "15 min", "$1.20–$3.00", "as the probe says"):
        assert words in block
    unknown = block_text(
        forecast_block({"trials": {"value": 5, "low": 5, "high": 5}, "seconds": None})
    )
    assert "5 to 5" not in unknown
    assert "time" not in unknown
    compared = comparison_block(view, now=BEGAN_AT)
    assert compared is not None
    assert "16 min 32 s" in block_text(compared)
    assert comparison_block(replace(view, forecast=None), now=BEGAN_AT) is None


def test_each_failure_is_told_once() -> None:
    view = make_living(HOME)
    assert [str(line) for line in failure_lines(view)] == [
        "1 trial failed: The loss is not finite at step 7. <script>window.hacked = 1</script>"
    ]


def test_studies_are_listed() -> None:
    table = block_text(studies_table([make_study(HOME), make_living(HOME)], now=BEGAN_AT + 60))
    assert "finished" in table
    assert "loss 0.3485" in table
    assert "40 of 40" in table


def test_lines_tell_what_happened_and_only_once() -> None:
    out = io.StringIO()
    watch = PlainStudy(Console(file=out, width=140, highlight=False))
    view = make_living(HOME)
    first = replace(view, trials=view.trials[:1])
    watch.show(first)
    watch.show(first)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(" trial 0    begins      lr=0.0239  batch=128")
    assert len(lines) == 1 + 9 + 1
    assert lines[-1].split()[2] == "done"
    running = view.trials[19]
    watch.show(replace(view, trials=(running,)))
    grown = replace(
        running,
        devices=4,
        trial=replace(running.trial, points=(*running.points, Point(2, (0.9,), 50.0))),
    )
    watch.show(replace(view, trials=(grown,)))
    assert [line.split()[2:] for line in out.getvalue().splitlines()[-2:]] == [
        ["rung", "2/9", "loss", "0.9"],
        ["devices", "2", "→", "4"],
    ]


def test_a_value_that_is_only_reached_again_is_no_new_best() -> None:
    out = io.StringIO()
    watch = PlainStudy(Console(file=out, width=140, highlight=False))
    view = make_study(HOME, 1)
    points = tuple(Point(rung, (loss,), 1.0) for rung, loss in enumerate((0.5, 0.25, 0.25), 1))
    trial = replace(view.trials[0].trial, points=points, copied_from=(7, 2))
    watch.show(with_trials(view, replace(view.trials[0], trial=trial)))
    begins, *rungs, _ = out.getvalue().splitlines()
    assert begins.endswith("  from trial 7 at rung 2")
    assert ["best so far" in line for line in rungs] == [False, True, False]


@pytest.mark.parametrize(
    ("dollars", "shown"),
    [
        (1234.4, "$1,234"),
        (2.5, "$2.50"),
        (0.0, "$0.00"),
        (0.03, "$0.030"),
        (0.0058, "$0.0058"),
        (2e-5, "< $0.0001"),
    ],
)
def test_small_costs_keep_two_digits(dollars: float, shown: str) -> None:
    assert show_dollars(dollars) == shown


def test_a_setting_of_short_names_is_not_cut() -> None:
    view = make_study(HOME)
    assert view.best is not None
    trial = replace(view.best.trial, params={"task": "image-classification"})
    shown = block_text(
        answer_block(replace(view, best=replace(view.best, trial=trial)), now=BEGAN_AT)
    )
    assert "  task  image-classification\n" in shown


def test_an_error_is_told_once_and_who_goes_on_is_told_of() -> None:
    out = io.StringIO()
    watch = PlainStudy(Console(file=out, width=140, highlight=False))
    view = make_living(HOME)
    held, other, third = view.trials[:3]
    held = replace(held, trial=replace(held.trial, state=TrialState.HELD))
    watch.show(replace(view, trials=(held, other, third)))
    before = len(out.getvalue().splitlines())
    failed = [
        replace(
            facts,
            trial=replace(facts.trial, state=TrialState.FAILED),
            error="no such file: x.csv",
            ended_at=BEGAN_AT + at,
        )
        for facts, at in ((other, 9), (third, 5))
    ]
    running = replace(held, trial=replace(held.trial, state=TrialState.RUNNING))
    watch.show(replace(view, trials=(running, *failed)))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()[before:]]
    assert lines[0] == f"trial 0 resumed from rung {held.trial.rung}"
    assert lines[1].startswith("trial 1 failed as trial 2")
    assert lines[2].startswith("trial 2 failed no such file: x.csv")
    free = replace(failed[1], device_seconds=0.0)
    watch = PlainStudy(Console(file=out, width=140, highlight=False))
    watch.show(replace(view, trials=(free,)))
    assert out.getvalue().endswith("failed      no such file: x.csv\n")


def test_a_study_that_goes_on_does_not_tell_again_what_was_told() -> None:
    out = io.StringIO()
    view = make_living(HOME)
    watch = PlainStudy(Console(file=out, width=140, highlight=False), view.trials[:-1])
    watch.show(view)
    told_of = {line.split()[1] for line in out.getvalue().splitlines()}
    assert told_of == {str(view.trials[-1].number)}


def test_the_live_table_fits_the_screen_and_stays_when_it_is_over() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=True, highlight=False)
    watch = LiveStudy(console)
    try:
        watch.show(make_living(HOME))
        watch.note("resting")
        lines = console.render_lines(watch.page(), pad=False)
        assert len(lines) <= 20
        assert "resting" in "".join(part.text for line in lines for part in line)
    finally:
        watch.close()
        watch.close()
    assert "24 of 24 trials" in out.getvalue()


def test_the_dump_is_strict_json_whatever_came() -> None:
    document = json.loads(to_json(dump_study(make_living(HOME))), parse_constant=pytest.fail)
    assert document["trials"][23]["curve"] == [[1, "NaN"]]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["tune"], "There is nothing to tune", "yunlu tune job.yaml"),
        (["tune", "nowhere.yaml"], "nowhere.yaml", ""),
        (
            ["tune", "{job}", "--trials", "-3"],
            "--trials: expected a whole number above 0, got -3",
            "",
        ),
        (["tune", "{job}", "--trials", "0"], "--trials: expected a whole number above 0", ""),
        (["tune", "{job}", "--budget", "-1"], "--budget: expected", ""),
        (["tune", "{job}", "--deadline", "soon"], "--deadline: expected a time", ""),
        (["tune", "{job}", "--method", "guess"], "--method: unknown sampler 'guess'", ""),
        (["tune", "{job}", "--stop", "never"], "--stop", ""),
        (["tune", "{job}", "--set", "search.space={}"], "is empty: name at least one field", ""),
        (["tune", "{job}", "--set", "search.space.train.optimizr.lr=[1, 2]"], "train.optimizr", ""),
        (["tune", "{job}", "--set", "search.space.train.batch=8 .. 2"], "below low", ""),
        (["tune", "{job}", "--name", "../x"], "cannot name a study", "letters"),
        (["tune", "{job}", "--budget", "5"], "no price is known", "YUNLU_DOLLARS_PER_HOUR"),
        (["tune", "{job}", "--devices", "100000"], "would be shares of", "or fewer"),
        (["tune", "--resume", "nope"], "there are no studies", "yunlu tune"),
        (["tune", "{job}", "--resume", "nope"], "has its job and its search already", "--trials"),
        (["study", "show"], "there are no studies", "yunlu tune"),
        (["study", "best", "x"], "there are no studies", "yunlu tune"),
        (["study", "report", "x"], "there are no studies", "yunlu tune"),
        (["study", "stop", "x"], "there are no studies", "yunlu tune"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: list[str], message: str, hint: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(job=job) if word == "{job}" else word for word in words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert hint in shown.err
    assert "Traceback" not in shown.err
    assert shown.err.count("error: ") == 1


def test_a_job_without_a_search_says_how_one_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert main(["tune", str(path), "--trials", "5", "--set", "search=null"]) == 1
    assert "has no search section" in capsys.readouterr().err
    assert main(["tune", str(path), "--trials", "5"]) == 1
    error = capsys.readouterr().err
    assert "has no search section" in error
    assert "train.optimizer.lr: 1e-4 .. 1e-1 log" in error


def test_a_plan_tells_what_the_study_takes_and_leaves_nothing_behind(
    job: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    day = Interval(value=86400.0, low=70000.0, high=90000.0)

    def trial_time(*_: Any, **__: Any) -> TrialTime:
        return TrialTime(seconds=day, source="a test")

    monkeypatch.setattr(forecast, "find_trial_time", trial_time)
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "3.6")
    words = ["tune", str(job), "--plan", "--metric", "loss", "--budget", "500", "--devices", "1"]
    words += ["--stop", "median", "--set", "search.stop.trials=3"]  # one after the other
    assert main(words) == 0
    shown = capsys.readouterr().out
    for each in ("1 dimension, 1 device", "forecast", "trials", "time", "cost", "$"):
        assert each in shown
    assert "dimensions" not in shown
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rungs"], told["forecast"]["bound"]) == (10, "budget")
    assert told["forecast"]["trials"]["value"] > 5
    assert not (own_home / "studies").exists()


def test_no_studies_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study"]) == 0
    assert "start one: yunlu tune JOB" in capsys.readouterr().out
    assert main(["study", "list", "--json"]) == 0
    assert capsys.readouterr().out == ""
