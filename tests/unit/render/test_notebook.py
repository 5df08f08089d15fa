"""A run, a plan and a study as a notebook shows them."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import yunlu
from tests.sample_events import sample
from tests.unit.jobs.fake_worker import PLAN
from yunlu.jobs.run_log import MetricRecord
from yunlu.planning.plan import Plan
from yunlu.render.notebook import BoundedCurve, NotebookView, is_notebook
from yunlu.runs.events import (
    ErrorRaised,
    Evaluated,
    ModelBuilt,
    PlanMade,
    ProgressReported,
    StateChanged,
    WarningRaised,
)

HOSTILE = "<script>alert(1)</script>"


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == [], "a tag is left open: it would swallow the rest of the notebook"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"br", "path"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def record(step: int, loss: float = 1.0) -> MetricRecord:
    fields = {"step": step, "epoch": step / 10, "loss": loss, "lr": 0.1, "at": float(step)}
    return MetricRecord(record={**fields, "samples": 8 * step, "attempt": 1})


def running(*items: object) -> NotebookView:
    plan = PlanMade(plan=Plan.model_validate(PLAN))
    states = [StateChanged(state="planning"), plan, StateChanged(state="running")]
    return NotebookView("digits-abc").take_all([*states, *items])


def evaluation(step: int, split: str = "validation") -> Evaluated:
    return sample(Evaluated, split=split, step=step, loss=1 / step, metrics={"accuracy": 0.5})


def test_a_run_that_goes_on_shows_bar_place_and_curves() -> None:
    view = running(
        *(record(step, 1 / step) for step in range(1, 11)), evaluation(5), evaluation(10)
    )
    html = view.to_html()
    assert 'class="yunlu-run running"' in html
    assert 'aria-valuenow="50"' in html
    assert "step 10/20" in html
    assert "ETA" in html
    assert html.count('class="chart"') == 2
    assert {"svg", "path", "table", "details"} <= set(Elements(html).tags)
    assert (
        view.to_text()
        == "digits-abc  running  step 10/20  epoch 1.0/2  validation accuracy 50.00 %"
    )


def test_what_it_does_before_the_first_step_is_said() -> None:
    view = NotebookView("digits-abc").take_all([ProgressReported(phase="loading data")])
    html = view.to_html()
    assert "loading data …" in html
    assert 'aria-valuenow="0"' in html
    assert 'class="chart"' not in html
    Elements(html)


def test_texts_of_others_stay_text() -> None:
    view = running(
        sample(ModelBuilt, name=HOSTILE),
        WarningRaised(message=HOSTILE),
        sample(Evaluated, split=HOSTILE, step=1, metrics={HOSTILE: 1.0}),
        ErrorRaised(code="x", message=HOSTILE, hint=HOSTILE),
        StateChanged(state="failed", reason=HOSTILE),
    )
    html = view.to_html()
    assert html.count("&lt;script&gt;") >= 6
    assert "script" not in Elements(html).tags
    assert "script" not in Elements(NotebookView(HOSTILE).to_html()).tags


def test_the_language_is_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    view = running(record(1), evaluation(1))
    assert "Running" in view.to_html()
    monkeypatch.setenv("YUNLU_LANG", "zh")
    html = view.to_html()
    assert "运行中" in html
    assert "Running" not in html


def test_the_test_score_stays_among_the_newest_evaluations() -> None:
    view = running(*(evaluation(step) for step in range(1, 15)), evaluation(14, "test"))
    html = view.to_html()
    assert html.count("<tr>") + html.count('<tr class="test">') <= 1 + 6 + 1 + 1
    assert html.count('<tr class="test">') == 1


def test_a_curve_of_any_length_is_bounded_and_keeps_its_mean() -> None:
    curve = BoundedCurve(most=50)
    for step in range(1, 100_001):
        curve.add(step, float(step % 2))
    assert 50 <= len(curve.points) <= 100
    assert all(value == pytest.approx(0.5, abs=0.01) for _, value in curve.points)
    assert curve.points[-1][0] > 95_000


def test_a_curve_goes_back_with_the_run_and_leaves_out_what_is_no_number() -> None:
    curve = BoundedCurve()
    for step in range(1, 11):
        curve.add(step, float(step))
    curve.add(6, 60.0)
    curve.add(7, float("nan"))
    curve.add(8, 80.0)
    assert curve.points[-3:] == [(5, 5.0), (6, 60.0), (8, 80.0)]


def test_this_process_is_no_notebook() -> None:
    assert not is_notebook()


def test_a_plan_shows_its_choices() -> None:
    plan = Plan.model_validate(PLAN)
    html = plan.model_copy(update={"reason": HOSTILE})._repr_html_()
    assert "exact on this device" in html
    assert "10.0 ms a step" in html
    Elements(html)


def test_options_show_a_row_each() -> None:
    options = yunlu.plan(
        task="language-modeling",
        model="hf:gpt2",
        data={"train": "corpus/", "tokens": 1_000_000, "max_length": 128},
        goal={"gpu": ["H100", "A100-80GB"], "max_devices": 1},
        batch=8,
        epochs=1,
        top=2,
    )
    html = options._repr_html_()
    assert Elements(html).tags.count("tr") == 1 + len(options)
    assert "H100" in html


def test_a_study_shows_its_best_trials() -> None:
    study = yunlu.Study(
        yunlu.Job(task="tabular-classification", model="mlp", data="sklearn:iris"),
        maximize="accuracy",
        search={"train.optimizer.lr": [0.1, 0.01, 0.001]},
        trials=3,
        name="rates",
    )
    study.optimize(lambda trial: trial["train.optimizer.lr"])
    html = study._repr_html_()
    assert "rates: finished, 3 trials" in html
    assert "★" in html
    assert "train.optimizer.lr" in html
    Elements(html)
