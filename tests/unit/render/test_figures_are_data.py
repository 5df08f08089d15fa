"""Figures are data: after a trip through JSON, the page that is drawn from them is the same."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tuning.made_studies import BEGAN_AT, make_living, make_pareto, make_study
from yunlu.jobs.report_builder import build_report
from yunlu.render import figure_values, html_page, run_report, study_report

JOBS = Path(__file__).parents[1] / "jobs"
FIGURES = (
    figure_values.LineFigure,
    figure_values.StackFigure,
    figure_values.BarFigure,
    figure_values.HeatmapFigure,
    figure_values.LayoutFigure,
    figure_values.ScatterFigure,
    figure_values.TrialCurvesFigure,
    figure_values.ParallelFigure,
    figure_values.Sparkline,
)
RUNS = {
    "write_classification": "test_report_builder.py",
    "write_regression": "test_report_builder.py",
    "write_tuned": "test_report_builder.py",
    "write_failed": "test_report_builder.py",
    "write_group_run": "test_worker_groups.py",
    "write_staged": "test_worker_groups.py",
    "write_talk": "test_communication.py",
}


class Captured:
    """Stands in for ``render_html``: renders once as asked, once from figures read back from JSON."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.page = self.again = ""

    def __call__(self, template: str, **content: Any) -> str:
        self.page = html_page.render_html(template, **content)
        self.again = html_page.render_html(template, **self.read_back(content))
        return self.page

    def read_back(self, value: Any) -> Any:
        if isinstance(value, FIGURES):
            self.kinds.add(type(value))
            return type(value).model_validate_json(value.model_dump_json())
        if isinstance(value, dict):
            return {key: self.read_back(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.read_back(item) for item in value])
        return value


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    captured = Captured()
    monkeypatch.setattr(run_report, "render_html", captured)
    monkeypatch.setattr(study_report, "render_html", captured)
    return captured


@pytest.mark.parametrize("write", list(RUNS))
def test_a_run_s_page_is_drawn_alike_from_json(
    write: str, captured: Captured, tmp_path: Path
) -> None:
    run = runpy.run_path(str(JOBS / RUNS[write]))[write](tmp_path / "run")
    run_report.render_page(build_report(run))
    assert captured.page == captured.again
    assert figure_values.LineFigure in captured.kinds


@pytest.mark.parametrize("make", [make_study, make_pareto, make_living])
def test_a_study_s_page_is_drawn_alike_from_json(
    make: Any, captured: Captured, tmp_path: Path
) -> None:
    study_report.render_page(make(tmp_path), now=BEGAN_AT + 700)
    assert captured.page == captured.again
    assert {
        figure_values.ScatterFigure,
        figure_values.TrialCurvesFigure,
        figure_values.ParallelFigure,
    } <= captured.kinds
