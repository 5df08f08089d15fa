"""The report as one HTML page that needs nothing else: no network, no fonts, no libraries.

Both languages are in the page; an attribute of the root decides which one shows. Scripts only add
comfort (hover, switches): everything can be read without them, and on paper.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.charts import (
    Drawing,
    Series,
    draw_lines,
    draw_stack,
    metric_unit,
    show_metric,
    show_quantity,
)
from yunlu.jobs.recorded import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.charts import Style, Unit
    from yunlu.jobs.findings import Comparison, ConfusionMatrix, Curve, EvaluationRow, Report

_TEMPLATES = Path(__file__).with_name("templates")
_MOST_CLASSES = 40
_MOST_DOTS = 60
_MOST_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart of the page: drawn once, or twice where a logarithmic scale helps."""

    id: str
    title: Markup
    unit: Unit
    legend: tuple[tuple[Markup, int], ...]
    drawings: dict[str, Drawing]
    """By scale: ``linear``, ``log``."""
    points: dict[str, Any]
    """What hovering reads out."""
    wide: bool = False


def render_page(report: Report, *, language: str = "en") -> str:
    """The whole page; ``language`` (``en`` or ``zh``) is what a reader sees first."""
    script = _source("page.js")
    calls = {"w": words, "known": _known_word, "metric": show_metric, "quantity": show_quantity}
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
        figures=list(_figures(report)),
        comparisons=[_comparison(each) for each in report.comparisons if _is_known(each)],
        time_figure=_time_figure(report),
        parts=_parts(report),
        metric_names=list(
            dict.fromkeys(name for row in report.evaluations for name in row.metrics)
        ),
        confusion=_heat(report.confusion),
    )


def words(key: str, **fields: Any) -> Markup:
    """A text of the page in both languages; the root's attribute hides one of them."""
    english, chinese = _words()[key]
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(
        escape(english).format(**fields), escape(chinese).format(**fields)
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
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
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _words() -> dict[str, tuple[str, str]]:
    return json.loads(_source("words.json"))


def _known_word(prefix: str, name: str) -> Markup:
    """A name in both languages where we know it, else the name itself."""
    return words(f"{prefix}.{name}") if f"{prefix}.{name}" in _words() else escape(name)


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cards(report: Report) -> Iterator[tuple[Markup, str, Markup]]:
    """Label, figure and a remark for each headline figure."""
    if (headline := report.headline) is not None:
        remark = "card.test" if headline.split == "test" else "card.validation"
        label = _known_word("metric", headline.metric)
        yield label, show_metric(headline.metric, headline.value), words(remark)
    elif (loss := report.curve("train_loss")) is not None:
        yield words("curve.loss"), show_number(loss.values[-1]), words("card.training")
    for name in ("total_s", "samples_per_s", "dollars", "memory_bytes"):
        each = report.comparison(name)
        if each.measured is None:
            continue
        remark = Markup("")
        if each.predicted is not None:
            remark = words("card.predicted", value=show_quantity(name, each.predicted))
        yield words(f"quantity.{name}"), show_quantity(name, each.measured), remark
    if report.step:
        epochs = "–" if report.epoch is None else show_count(report.epoch)
        remark = words("card.epochs", epochs=epochs)
        if report.plan:
            remark = words("card.of", total=f"{report.plan.steps:,}", epochs=epochs)
        yield words("card.steps"), f"{report.step:,}", remark


def _figures(report: Report) -> Iterator[Figure]:
    yield from _figure(
        report,
        words("curve.loss"),
        {"train_loss": "faint", "train_loss_smoothed": "line", "validation_loss": "dots"},
        wide=True,
        log=True,
    )
    for curve in report.curves:
        prefix, _, name = curve.key.partition("/")
        if prefix == "validation" and name:
            title = _known_word("metric", name)
            unit = metric_unit(name, curve.values)
            yield from _figure(report, title, {curve.key: "dots"}, unit=unit)
    yield from _figure(report, words("curve.lr"), {"lr": "line"})
    noisy: dict[str, Unit] = {"grad_norm": "number", "samples_per_s": "rate", "items_per_s": "rate"}
    for key, unit in noisy.items():
        styles: dict[str, Style] = {key: "faint", f"{key}_smoothed": "line"}
        title = words(f"curve.{key}")
        yield from _figure(report, title, styles, unit=unit, log=key == "grad_norm")
    yield from _figure(report, words("curve.memory"), {"memory_bytes": "line"}, unit="bytes")


def _figure(
    report: Report,
    title: Markup,
    styles: dict[str, Style],
    *,
    unit: Unit = "number",
    wide: bool = False,
    log: bool = False,
) -> Iterator[Figure]:
    """The chart of these curves, if the run has any of them."""
    found = [curve for key in styles if (curve := report.curve(key)) is not None]
    if not found:
        return
    lines = [
        Series(
            key=curve.key,
            points=list(zip(curve.steps, curve.values, strict=True)),
            colour=list(styles).index(curve.key) + 1,
            style=_style(curve, styles[curve.key], alone=len(found) == 1),
        )
        for curve in found
    ]
    scales = ["linear", "log"] if log and _fits_log(found) else ["linear"]
    yield Figure(
        id=found[0].key.replace("/", "-"),
        title=title,
        unit=unit,
        legend=tuple((_known_word("series", line.key), line.colour) for line in lines)
        if len(lines) > 1
        else (),
        drawings={scale: draw_lines(lines, unit=unit, log=scale == "log") for scale in scales},
        points={"unit": unit, "series": [_read_out(curve) for curve in found]},
        wide=wide,
    )


def _style(curve: Curve, wanted: Style, *, alone: bool) -> Style:
    """Dots that would touch become a line; so does a raw curve with no smoothed one over it."""
    dense = wanted == "dots" and len(curve.steps) > _MOST_DOTS
    return "line" if dense or (wanted == "faint" and alone) else wanted


def _fits_log(curves: Sequence[Curve]) -> bool:
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0


def _read_out(curve: Curve) -> dict[str, Any]:
    values = [float(f"{v:.6g}") if math.isfinite(v) else str(v) for v in curve.values]
    return {"name": _pair(f"series.{curve.key}", curve.key), "x": curve.steps, "y": values}


def _pair(key: str, otherwise: str) -> Sequence[str]:
    return _words().get(key, (otherwise.removeprefix("validation/"),) * 2)


def _time_figure(report: Report) -> Figure | None:
    time = report.time
    if time is None or not time.steps:
        return None
    drawing = draw_stack(time.steps, [time.shares[part] for part in PARTS])
    series = [
        {
            "name": _pair(f"part.{part}", part),
            "x": time.steps,
            "y": [round(share, 5) for share in time.shares[part]],
        }
        for part in PARTS
    ]
    return Figure(
        id="time",
        title=words("time.over_steps"),
        unit="percent",
        legend=(),
        drawings={"linear": drawing},
        points={"unit": "percent", "series": series},
    )


def _parts(report: Report) -> list[dict[str, Any]]:
    totals = report.time.totals if report.time else {}
    whole = sum(totals.values())
    return [
        {"name": part, "colour": i, "seconds": totals[part], "share": totals[part] / whole}
        for i, part in enumerate(PARTS, 1)
        if whole and totals.get(part)
    ]


def _evaluations(report: Report) -> list[EvaluationRow]:
    """Evenly chosen where there are very many; the best, the last and the test's always."""
    rows = report.evaluations
    stride = math.ceil(len(rows) / _MOST_ROWS)
    return [
        row
        for i, row in enumerate(reversed(rows))
        if not i % stride or row.best or row.split == "test"
    ][::-1]


def _is_known(each: Comparison) -> bool:
    return each.predicted is not None or each.measured is not None


def _comparison(each: Comparison) -> dict[str, Any]:
    """Bar lengths as shares of the longer of the two."""
    finite = [v for v in (each.predicted, each.measured) if v is not None and math.isfinite(v)]
    longest = max(finite, default=0.0)

    def share(value: float | None) -> float:
        return value / longest if value is not None and math.isfinite(value) and longest else 0.0

    return {
        "row": each,
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
