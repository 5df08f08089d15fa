"""The report of a study: what it draws, what it weighs, and what it makes of odd studies."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tuning.made_studies import (
    BEGAN_AT,
    LR,
    NAME,
    RUNGS,
    SCRIPT,
    make_living,
    make_pareto,
    make_study,
    replace,
    with_trials,
)
from yunlu.core.errors import StoreError
from yunlu.render.format import shorten, train_command
from yunlu.render.study_report import dump_study, render_page, write_report
from yunlu.tuning.facts import StudyView
from yunlu.tuning.importance import compute_importance, expect_finals, rank_trials_by_value
from yunlu.tuning.values import ParamValue, Point, Trial, TrialState


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "studies" / "digits-search"
    path.mkdir(parents=True)
    return path


def render(view: StudyView, **options: Any) -> str:
    return render_page(view, now=BEGAN_AT + 700, **options)


def picture(page: str, name: str) -> str:
    found = re.search(rf'<figure[^>]*id="picture-{re.escape(name)}">.*?</figure>', page, re.DOTALL)
    assert found, f"no picture {name}"
    return found[0]


def test_every_picture_is_drawn_with_a_mark_for_each_trial(place: Path) -> None:
    view = make_study(place)
    page = render(view)
    for name in ("curves", "parallel", "pair", f"slice-{LR}", "best-time", "best-dollars"):
        drawn = picture(page, name)
        told = re.search(r"application/json\">(.*?)</script>", drawn)
        assert told
        numbers = {number for _, _, number in json.loads(told[1])}
        # A best that is far off may lie beyond the edge of the picture of the best.
        assert numbers == {each.number for each in view.trials} or name.startswith("best")
        assert set(map(int, re.findall(r'data-trial="(\d+)"', drawn))) == numbers
    assert 'id="picture-front"' not in page


def test_the_best_line_ends_at_the_best_value(place: Path) -> None:
    view = make_study(place)
    assert view.best is not None
    line = re.search(r'class="best" d="([^"]*)"', picture(render(view), "best-time"))
    assert line
    heights = [float(each) for each in re.findall(r"[ML][\d.]+ ([\d.]+)", line[1])]
    assert heights == sorted(heights)  # from the top down: less is better
    assert re.findall(r"L([\d.]+) ", line[1])[-1] == "1000"


def test_a_metric_to_make_large_rises(place: Path) -> None:
    view = make_study(place, conditional=False, direction="maximize", metric="accuracy")
    page = render(view)
    line = re.search(r'class="best" d="([^"]*)"', picture(page, "best-time"))
    assert line
    heights = [float(each) for each in re.findall(r"[ML][\d.]+ ([\d.]+)", line[1])]
    assert heights == sorted(heights, reverse=True)
    assert re.search(r"\d\d\.\d\d %", page)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_trials_are_no_trouble(place: Path, count: int) -> None:
    page = render(make_study(place, count))
    assert ("No trial has been evaluated yet" in page) is (count == 0)
    assert ("Importance needs 8 trials" in page) is (count > 0)
    assert ('id="picture-pair"' in page) is (count >= 3)


def test_a_study_of_failures_says_each_error_once(place: Path) -> None:
    view = make_study(place, 5, state="failed", reason="the first 3 trials failed alike")
    failed = [
        replace(
            each,
            trial=replace(each.trial, state=TrialState.FAILED, points=()),
            times=(),
            error="The data cannot be read.",
        )
        for each in view.trials
    ]
    page = render(with_trials(view, *failed))
    assert page.count("The data cannot be read.") == 1 + len(failed)  # and as the rows' titles
    assert "trials 0, 1, 2, 3, 4" in page
    assert 'id="best"' not in page


def test_what_lives_is_shown_as_it_stands(place: Path) -> None:
    view = make_living(place)
    page = render(view)
    for state in ("running", "held", "pruned", "done", "failed"):
        assert f'standing {state}"' in page
    rows = re.findall(r'<tr data-trial="(\d+)"', page)
    assert view.best is not None
    assert rows[0] == str(view.best.number)
    assert len(rows) == len(view.trials)


def test_hostile_text_is_only_text(place: Path) -> None:
    page = render(make_living(place))
    assert SCRIPT not in page
    assert html.escape(SCRIPT) in page
    assert set(re.findall(r"<script[^>]*>", page)) == {
        "<script>",
        '<script type="application/json">',
        '<script type="application/json" id="facts">',
    }


def test_the_page_asks_for_nothing_beyond_itself(place: Path) -> None:
    page = render(make_pareto(place))
    assert not re.search(r'src="', page)
    assert not re.search(r'href="(?!#|data:)', page)  # no run has a report here
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_rows_link_to_the_reports_of_their_runs_from_wherever_the_page_lies(place: Path) -> None:
    view = make_study(place, 3)
    run = place.parent.parent / "digits-001"
    run.mkdir()
    (run / "report.html").write_text("")
    assert '<a href="../../digits-001/report.html">1</a>' in render(view)  # seen without scrolling
    assert 'href="digits-001/report.html"' in render(view, beside=place.parent.parent / "page.html")
    assert "digits-002/report.html" not in render(view)


def test_trials_that_were_meant_to_be_shorter_save_nothing(place: Path) -> None:
    view = make_study(place)
    assert "Evaluations saved" in render(view)
    short = [
        replace(each, trial=replace(each.trial, state=TrialState.DONE, points=each.points[:1]))
        for each in view.trials
        if each.points
    ]
    short = [replace(each, times=each.times[:1]) for each in short]
    assert "Evaluations saved" not in render(replace(view, trials=tuple(short)))


def test_two_objectives_have_a_front(place: Path) -> None:
    view = make_pareto(place)
    page = render(view)
    drawn = picture(page, "front")
    line = re.search(r'class="front" d="([^"]*)"', drawn)
    assert line
    assert len(re.findall(r"[ML]", line[1])) == len(view.front)
    costs = [values[1] for values in sorted([*(each.values or ())] for each in view.front)]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reader_s_language_comes_first_and_both_are_there(place: Path, language: str) -> None:
    page = render(make_study(place, 3), language=language)
    assert f'data-language="{language}"' in page
    assert '<span lang="en">Learning curves</span><span lang="zh">学习曲线</span>' in page


def test_a_report_that_cannot_be_written_says_why(place: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        write_report(make_study(place, 1), place / "nowhere" / "page.html")


def test_the_report_lies_in_the_study_s_directory(place: Path) -> None:
    path = write_report(make_study(place, 2))
    assert path == place / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


# What the pictures are made of.


@pytest.mark.parametrize(("conditional", "evaluator"), [(True, "ped-anova"), (False, "fanova")])
def test_what_matters_most_is_found_among_trials_that_stopped_early(
    place: Path, conditional: bool, evaluator: str
) -> None:
    found = compute_importance(make_study(place, conditional=conditional))
    assert found is not None
    assert found.evaluator == evaluator
    assert next(iter(found.shares)) == LR
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["model.args.dropout"] < found.shares[LR] / 4


def test_few_trials_or_one_setting_have_no_importance(place: Path) -> None:
    assert compute_importance(make_study(place, 7)) is None
    view = make_study(place, 12, conditional=False)
    same = [
        replace(each, trial=replace(each.trial, params=dict(view.trials[0].params)))
        for each in view.trials
    ]
    assert compute_importance(with_trials(view, *same)) is None


def trial(number: int, *values: float) -> Trial:
    points = tuple(Point(rung, (value,), float(rung)) for rung, value in enumerate(values, 1))
    return Trial(number=number, params={}, state=TrialState.PRUNED, points=points)


def test_a_trial_that_stopped_is_carried_on_by_the_median() -> None:
    finals = expect_finals(
        [trial(0, 5, 3, 2), trial(1, 6, 4, 4), trial(2, 9, 7, 5), trial(3, 8), trial(4, math.nan)]
    )
    # From the first rung on the others gained 2, and of those 1, 0 and 2: the median is 1.
    assert finals == {0: 2, 1: 4, 2: 5, 3: 8 - 2 - 1, 4: 5}
    assert expect_finals([trial(0), trial(1, math.nan)]) == {}


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=8))
def test_whole_curves_keep_their_order(curves: list[list[float]]) -> None:
    trials = [trial(number, *curve) for number, curve in enumerate(curves)]
    finals = expect_finals(trials)
    assert finals.keys() == {each.number for each in trials if each.points}
    longest = max((len(curve) for curve in curves), default=0)
    for number, curve in enumerate(curves):
        if curve and len(curve) == longest:
            assert finals[number] == pytest.approx(min(curve))
    places = rank_trials_by_value(finals)
    assert sorted(places, key=lambda n: places[n]) == sorted(finals, key=lambda n: (finals[n], n))
    assert all(0 <= share <= 1 for share in places.values())


# Names and commands.


def test_names_are_as_short_as_they_are_clear() -> None:
    fields = ["train.optimizer.lr", "train.batch", "a.x.rate", "b.x.rate", "c.y.rate", "name"]
    assert list(shorten(fields).values()) == [
        "lr",
        "batch",
        "a.x.rate",
        "b.x.rate",
        "y.rate",
        "name",
    ]


@given(st.lists(st.from_regex(r"[ab](\.[ab]){0,3}", fullmatch=True), unique=True, max_size=6))
def test_short_names_tell_fields_apart(fields: list[str]) -> None:
    short = shorten(fields)
    assert len(set(short.values())) == len(fields)
    assert all(field == name or field.endswith(f".{name}") for field, name in short.items())


@pytest.mark.parametrize(
    "value", [1e-5, 0.1, 3, 1e22, True, None, "adamw", "no", "1", "a: b", "it's", "", "- x"]
)
def test_the_command_gives_back_the_very_values(place: Path, value: ParamValue) -> None:
    view = make_study(place, 1)
    facts = replace(view.trials[0], trial=replace(view.trials[0].trial, params={"a.b": value}))
    words = shlex.split(train_command(view, facts))
    assert words[:3] == ["yunlu", "train", "examples/tune_digits.yaml"]
    name, _, text = words[4].partition("=")
    assert name == "a.b"
    found = yaml.safe_load(text)
    assert found == value
    assert type(found) is type(value)


def test_the_command_says_again_what_was_said_and_what_the_target_needs(place: Path) -> None:
    view = replace(
        make_study(place, 1),
        overrides=("search.trials=9", "train.epochs=3"),
        extra={"model.args.mup_base": 64},
    )
    assert view.best is not None
    words = shlex.split(train_command(view, view.best))
    assert words[3:7] == ["--set", "train.epochs=3", "--set", "model.args.mup_base=64"]


def test_a_list_in_a_setting_is_a_list_in_the_command(place: Path) -> None:
    view = make_study(place, 1)
    params: dict[str, ParamValue] = {"model.args.hidden": "[64, 32]"}
    facts = replace(view.trials[0], trial=replace(view.trials[0].trial, params=params))
    text = shlex.split(train_command(view, facts))[4].partition("=")[2]
    assert yaml.safe_load(text) == [64, 32]


def test_the_dump_is_json_and_has_everything(place: Path) -> None:
    view = make_living(place)
    told = json.loads(json.dumps(dump_study(view)))
    assert view.best is not None
    assert told["best"]["number"] == view.best.number
    assert told["best"]["command"].startswith("yunlu train ")
    assert [each["number"] for each in told["trials"]] == list(range(24))
    assert told["space"][NAME]["choices"] == ["adamw", "sgd"]
    assert told["rungs"] == RUNGS
