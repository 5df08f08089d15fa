"""The report of a run as one HTML page."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from yunlu.core.units import show_count, show_duration, show_number
from yunlu.render.figures.run import (
    comparison_figure,
    confusion_figure,
    phase_totals,
    run_figures,
    time_figure,
    time_totals,
)
from yunlu.render.format import show_metric, show_quantity
from yunlu.render.html_page import render_html
from yunlu.render.i18n.texts import known_text, same, text
from yunlu.render.run_report.communication import present_communication
from yunlu.render.run_report.workers import present_workers
from yunlu.runs.events import MemoryExhausted, PrecisionChanged, RolledBack, StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.report_model import ConfusionMatrix, EvaluationRow, Report
    from yunlu.render.i18n.texts import BilingualText
    from yunlu.runs.fold import Incident

_MOST_ROWS = 200
_MOST_OPERATORS = 15
_FEW = 8


def render_page(report: Report, *, language: str = "en") -> str:
    """The whole page; ``language`` (``en`` or ``zh``) is what a reader sees first."""
    # Overflows are how a loss scale is found: one sentence, not a row each.
    incidents = [
        incident
        for incident in report.incidents
        if not (isinstance(incident, StepSkipped) and incident.reason == "overflow")
    ]
    return render_html(
        "run.html.j2",
        language=language,
        scripts=["page.js"],
        styles=["style.css"],
        report=report,
        cards=list(_cards(report)),
        evaluations=_evaluations(report),
        figures=list(run_figures(report)),
        comparisons=[(row, comparison_figure(row)) for row in report.comparisons if row.is_known],
        time_figure=time_figure(report),
        time_totals=time_totals(report),
        metric_names=list(
            dict.fromkeys(name for row in report.evaluations for name in row.metrics)
        ),
        confusion=_confusion(report.confusion),
        incidents=[_incident(incident) for incident in incidents[-_MOST_ROWS:]],
        incidents_total=len(incidents),
        trace=_trace(report),
        workers=present_workers(report.worker_group) if report.worker_group else None,
        communication=present_communication(report),
    )


def _cards(report: Report) -> Iterator[tuple[BilingualText, str, BilingualText]]:
    """Label, value and remark of each headline number."""
    if (headline := report.headline) is not None:
        remark = text("card.test" if headline.split == "test" else "card.validation")
        label = known_text("metric", headline.metric)
        yield label, show_metric(headline.metric, headline.value), remark
    elif (loss := report.curve("train_loss")) is not None:
        yield text("curve.loss"), show_number(loss.values[-1]), text("card.training")
    for quantity in ("total_s", "samples_per_s", "dollars", "memory_bytes"):
        row = report.comparison(quantity)
        if row.measured is None:
            continue
        remark = same("")
        if row.predicted is not None:
            remark = text("card.predicted", value=show_quantity(quantity, row.predicted))
        yield text(f"quantity.{quantity}"), show_quantity(quantity, row.measured), remark
    if (group := report.worker_group) is not None and group.effective is not None:
        changes = len(group.changes) - 1
        remark = text("card.effective", lost=show_duration(group.lost_s), count=changes)
        yield text("workers.effective"), f"{group.effective * 100:.1f} %", remark
    if (padding := report.padding) is not None:
        remark = text("card.tokens", tokens=show_count(padding.tokens))
        yield text("card.padding"), f"{padding.share * 100:.1f} %", remark
    if report.step:
        epochs = "–" if report.epoch is None else show_count(report.epoch)
        remark = text("card.epochs", epochs=epochs)
        if report.plan:
            remark = text("card.of", total=f"{report.plan.steps:,}", epochs=epochs)
        yield text("card.steps"), f"{report.step:,}", remark


def _incident(event: Incident) -> dict[str, Any]:
    """What happened, and whatever its event says about it."""
    match event:
        case StepSkipped():
            loss, norm = show_number(event.loss), show_number(event.norm)
            reason, details = event.reason, [text("incident.skip", loss=loss, norm=norm)]
        case RolledBack():
            reason = ""
            details = [text("incident.rollback", to_step=show_number(event.to_step))]
            if event.skipping:
                details.append(text("incident.skipping", steps=_show_steps(event.skipping)))
        case MemoryExhausted():
            reason = event.message
            details = [text("incident.out_of_memory", micro_batch=event.micro_batch)]
        case PrecisionChanged():
            reason = event.reason
            details = [
                same(event.module, code=True),
                text("incident.low_share", share=f"{event.low_share * 100:.1f} %"),
            ]
    what = known_text("mark", event.kind)
    if isinstance(event, PrecisionChanged):
        what = known_text("incident.to", event.to)
    if reason:  # after the module that it is about
        details.insert(isinstance(event, PrecisionChanged), known_text("reason", reason))
    return {"step": event.step, "kind": event.kind, "what": what, "details": details}


def _show_steps(steps: Sequence[int]) -> str:
    shown = [show_number(step) for step in steps[:_FEW]]
    return ", ".join(shown) + (", …" if len(steps) > _FEW else "")


def _trace(report: Report) -> dict[str, Any] | None:
    if report.trace is None:
        return None
    operators = report.trace.table[:_MOST_OPERATORS]
    return {
        "phases": phase_totals(report.trace),
        "operators": [(operator, _operator_name(operator.name)) for operator in operators],
    }


def _operator_name(name: str) -> BilingualText:
    """Operators are called the same in every language; what is none has a text."""
    outside = re.fullmatch(r"outside operators \((\w+)\)", name)
    if outside is None:
        return same(name, code=True)
    return text("trace.outside", phase=known_text("phase", outside[1]))


def _evaluations(report: Report) -> list[EvaluationRow]:
    """Of very many, an even choice; the best, the last and the test's always."""
    rows = report.evaluations
    stride = math.ceil(len(rows) / _MOST_ROWS)
    return [
        row
        for index, row in enumerate(reversed(rows))
        if not index % stride or row.best or row.split == "test"
    ][::-1]


def _confusion(matrix: ConfusionMatrix | None) -> dict[str, Any] | None:
    if matrix is None:
        return None
    order = range(len(matrix.labels))
    mistakes = [
        (matrix.counts[i][j], matrix.labels[i], matrix.labels[j])
        for i in order
        for j in order
        if i != j and matrix.counts[i][j]
    ]
    return {
        "matrix": matrix,
        "figure": confusion_figure(matrix),
        "mistakes": sorted(mistakes, key=lambda mistake: -mistake[0])[:5],
    }
