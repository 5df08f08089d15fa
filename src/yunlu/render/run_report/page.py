"""The report as one HTML page that needs nothing else: no network, no fonts, no libraries.

Both languages are in the page; an attribute of the root decides which one shows. Scripts only add
comfort (hover, switches): everything can be read without them, and on paper.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.run_log import PARTS, number
from yunlu.render.figures.run import figures_of, time_figure
from yunlu.render.format import show_metric, show_quantity
from yunlu.render.i18n.texts import known_text, text
from yunlu.render.run_report.communication import picture_communication
from yunlu.render.run_report.workers import picture_crew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.report_model import (
        Comparison,
        ConfusionMatrix,
        EvaluationRow,
        Incident,
        Report,
        TracedSteps,
    )

TEMPLATES = Path(__file__).with_name("templates")
_MOST_CLASSES = 40
_MOST_ROWS = 200
_MOST_OPERATORS = 15
_FEW = 8


def render_page(report: Report, *, language: str = "en") -> str:
    """The whole page; ``language`` (``en`` or ``zh``) is what a reader sees first."""
    script = _source("page.js")
    # Overflows are how a loss scale is found: told in one sentence, not in a row each.
    incidents = [each for each in report.incidents if each.data.get("reason") != "overflow"]
    calls = {"w": text, "known": known_text, "metric": show_metric, "quantity": show_quantity}
    page = _environment().get_template("page.html.j2", globals=calls)
    return page.render(
        report=report,
        language="zh" if language == "zh" else "en",
        style=Markup(_source("style.css")),  # noqa: S704 (our own file)
        script=Markup(script),  # noqa: S704 (our own file)
        # Only this very script may run, so nothing smuggled in through data ever does.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        cards=list(_cards(report)),
        evaluations=_evaluations(report),
        figures=list(figures_of(report)),
        comparisons=[_comparison(each) for each in report.comparisons if each.is_known],
        time_figure=time_figure(report),
        parts=_parts(report),
        metric_names=list(
            dict.fromkeys(name for row in report.evaluations for name in row.metrics)
        ),
        confusion=_heat(report.confusion),
        incidents=[_incident(each) for each in incidents[-_MOST_ROWS:]],
        incidents_total=len(incidents),
        trace=_trace(report.trace),
        worker_group=picture_crew(report.worker_group) if report.worker_group else None,
        communication=picture_communication(report),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=show_bytes, count=show_count, duration=show_duration, instant=_instant, plain=_plain
    )
    return environment


def _source(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cards(report: Report) -> Iterator[tuple[Markup, str, Markup]]:
    """Label, figure and a remark for each headline figure."""
    if (headline := report.headline) is not None:
        remark = "card.test" if headline.split == "test" else "card.validation"
        label = known_text("metric", headline.metric)
        yield label, show_metric(headline.metric, headline.value), text(remark)
    elif (loss := report.curve("train_loss")) is not None:
        yield text("curve.loss"), show_number(loss.values[-1]), text("card.training")
    for name in ("total_s", "samples_per_s", "dollars", "memory_bytes"):
        each = report.comparison(name)
        if each.measured is None:
            continue
        remark = Markup("")
        if each.predicted is not None:
            remark = text("card.predicted", value=show_quantity(name, each.predicted))
        yield text(f"quantity.{name}"), show_quantity(name, each.measured), remark
    if (worker_group := report.worker_group) is not None and worker_group.effective is not None:
        remark = text(
            "card.effective", lost=show_duration(worker_group.lost_s), count=len(worker_group.changes) - 1
        )
        yield text("crew.effective"), f"{worker_group.effective * 100:.1f} %", remark
    if (padding := report.padding) is not None:
        remark = text("card.tokens", tokens=show_count(padding.tokens))
        yield text("card.padding"), f"{padding.share * 100:.1f} %", remark
    if report.step:
        epochs = "–" if report.epoch is None else show_count(report.epoch)
        remark = text("card.epochs", epochs=epochs)
        if report.plan:
            remark = text("card.of", total=f"{report.plan.steps:,}", epochs=epochs)
        yield text("card.steps"), f"{report.step:,}", remark


def _parts(report: Report) -> list[dict[str, Any]]:
    totals = report.time.totals if report.time else {}
    whole = sum(totals.values())
    return [
        {"name": part, "colour": i, "seconds": totals[part], "share": totals[part] / whole}
        for i, part in enumerate(PARTS, 1)
        if whole and totals.get(part)
    ]


def _incident(each: Incident) -> dict[str, Any]:
    """What happened, and whatever its event tells about it."""
    data = each.data
    what = f"incident.to.{data.get('to')}" if each.kind == "precision" else f"mark.{each.kind}"
    details: list[Markup] = []
    if each.kind == "skip":
        loss, norm = (_show_any(data.get(key)) for key in ("loss", "norm"))
        details.append(text("incident.skip", loss=loss, norm=norm))
    elif each.kind == "rollback":
        details.append(text("incident.rollback", to_step=_show_any(data.get("to_step"))))
        if skipping := data.get("skipping"):
            details.append(text("incident.skipping", steps=_show_any(skipping)))
    elif each.kind == "out_of_memory":
        details.append(text("incident.out_of_memory", micro_batch=data.get("micro_batch", "–")))
    else:
        details.append(Markup("<code>{}</code>").format(data.get("module", "–")))
        if (share := number(data.get("low_share"))) is not None:
            details.append(text("incident.low_share", share=f"{share * 100:.1f} %"))
    if reason := data.get("reason") or data.get("message"):
        details.insert(each.kind == "precision", known_text("reason", str(reason)))
    return {
        "step": each.step,
        "kind": each.kind,
        "what": known_text(*what.rsplit(".", 1)),
        "details": details,
    }


def _show_any(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = [_show_any(each) for each in value[:_FEW]]
        return ", ".join(shown) + (", …" if len(value) > _FEW else "")
    found = number(value)
    return "–" if found is None else show_number(found)


def _trace(traced: TracedSteps | None) -> dict[str, Any] | None:
    if traced is None:
        return None
    return {
        "phases": [
            {"name": each.name, "total_s": each.total_s, "share": each.share, "colour": colour}
            for colour, each in enumerate(traced.phases, 1)
            if each.total_s
        ],
        "rows": [
            {"row": row, "name": _operator(row.name)} for row in traced.table[:_MOST_OPERATORS]
        ],
    }


def _operator(name: str) -> Markup:
    """An operator's name is the same in every language; what is none has words."""
    outside = re.fullmatch(r"outside operators \((\w+)\)", name)
    if outside is None:
        return Markup("<code>{}</code>").format(name)
    return text("trace.outside", phase=known_text("phase", outside[1]))


def _evaluations(report: Report) -> list[EvaluationRow]:
    """Evenly chosen where there are very many; the best, the last and the test's always."""
    rows = report.evaluations
    stride = math.ceil(len(rows) / _MOST_ROWS)
    return [
        row
        for i, row in enumerate(reversed(rows))
        if not i % stride or row.best or row.split == "test"
    ][::-1]


def _comparison(each: Comparison) -> dict[str, Any]:
    """Bar lengths as shares of the longest of all."""
    values = each.estimated, each.predicted, each.measured, *(each.interval or ())
    longest = max((v for v in values if v is not None and math.isfinite(v)), default=0.0)

    def share(value: float | None) -> float:
        return value / longest if value is not None and math.isfinite(value) and longest else 0.0

    return {
        "row": each,
        "foretold_share": share(each.estimated),
        "interval_share": [share(edge) for edge in each.interval] if each.interval else None,
        "predicted_share": share(each.predicted),
        "measured_share": share(each.measured),
    }


def _heat(matrix: ConfusionMatrix | None) -> dict[str, Any] | None:
    """Rows with each cell's share of its true label; the most frequent labels if there are many."""
    if matrix is None:
        return None
    order = range(len(matrix.labels))
    kept = sorted(sorted(order, key=lambda i: -matrix.classes[i].support)[:_MOST_CLASSES])
    rows = [
        {
            "label": matrix.labels[i],
            "support": matrix.classes[i].support,
            "cells": [
                {
                    "count": matrix.counts[i][j],
                    # A root, because single mistakes are what people look for.
                    "shade": math.sqrt(matrix.counts[i][j] / max(matrix.classes[i].support, 1)),
                    "right": i == j,
                }
                for j in kept
            ],
        }
        for i in kept
    ]
    mistaken = [
        (matrix.counts[i][j], matrix.labels[i], matrix.labels[j])
        for i in order
        for j in order
        if i != j and matrix.counts[i][j]
    ]
    return {
        "matrix": matrix,
        "rows": rows,
        "labels": [matrix.labels[j] for j in kept],
        "left_out": len(matrix.labels) - len(kept),
        "mistaken": sorted(mistaken, key=lambda each: -each[0])[:5],
    }
