"""Figures of one run: curves over the step, time split, comparisons, confusion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yunlu.jobs.run_log import PARTS
from yunlu.render.figures.axes import fit_axis, step_axis
from yunlu.render.figures.values import (
    Bar,
    BarFigure,
    BarSegment,
    EventMarks,
    HeatmapFigure,
    LineFigure,
    Series,
    StackFigure,
    StackLayer,
)
from yunlu.render.format import metric_unit, show_bytes, show_duration, show_quantity
from yunlu.render.i18n.texts import known_text, text
from yunlu.runs.events import StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.communication import Expectation
    from yunlu.jobs.report_model import Comparison, ConfusionMatrix, Curve, Report
    from yunlu.render.figures.values import LineStyle, Unit
    from yunlu.render.i18n.texts import BilingualText
    from yunlu.runs.events import TraceWritten

_MOST_DOTS = 60
_MOST_MARKS = 200
_MOST_CLASSES = 40
_PADDING = 0.06


def run_figures(report: Report) -> Iterator[LineFigure]:
    """Every line chart that the run has curves for."""
    yield from _line_figure(
        report,
        text("curve.loss"),
        {"train_loss": "faint", "train_loss_smoothed": "line", "validation_loss": "dots"},
        marks=_marks(report),
        wide=True,
        log=True,
    )
    for curve in report.curves:
        prefix, _, name = curve.key.partition("/")
        if prefix == "validation" and name:
            unit = metric_unit(name, curve.values)
            title = known_text("metric", name)
            yield from _line_figure(report, title, {curve.key: "dots"}, unit=unit)
    yield from _line_figure(report, text("curve.lr"), {"lr": "line"})
    noisy: dict[str, Unit] = {
        "grad_norm": "number",
        "samples_per_s": "rate",
        "items_per_s": "rate",
        "tokens_per_s": "rate",
        "padding_share": "percent",
    }
    for key, unit in noisy.items():
        yield from _line_figure(
            report, text(f"curve.{key}"), _raw_and_smoothed(key), unit=unit, log=key == "grad_norm"
        )
    yield from _line_figure(report, text("curve.memory"), {"memory_bytes": "line"}, unit="bytes")
    # The batch may be a thousandth of the scale: on a linear axis it would lie on the floor.
    noise: dict[str, LineStyle] = {**_raw_and_smoothed("noise_scale"), "batch": "line"}
    yield from _line_figure(report, text("curve.noise"), noise, log=True, prefer_log=True)
    yield from _line_figure(report, text("curve.low_share"), {"low_share": "line"}, unit="percent")
    yield from _line_figure(
        report, text("curve.loss_scale"), {"loss_scale": "line"}, log=True, prefer_log=True
    )


def communication_figures(report: Report) -> Iterator[LineFigure]:
    """Duration, bytes and compression error of the exchange in each step."""
    units: dict[str, Unit] = {
        "exchange_s": "duration",
        "sent_bytes": "bytes",
        "compression_error": "percent",
    }
    for key, unit in units.items():
        yield from _line_figure(report, text(f"curve.{key}"), _raw_and_smoothed(key), unit=unit)


def time_figure(report: Report) -> StackFigure | None:
    """Shares of the time over the steps."""
    time = report.time
    if time is None or not time.steps:
        return None
    return StackFigure(
        id="time",
        title=text("time.over_steps"),
        x=step_axis(time.steps, text("step")),
        positions=time.steps,
        layers=tuple(
            StackLayer(key=part, name=text(f"part.{part}"), shares=time.shares[part])
            for part in PARTS
        ),
    )


def time_totals(report: Report) -> BarFigure | None:
    """Seconds of the whole run by what took them; None where there are none."""
    totals = report.time.totals if report.time else {}
    segments = tuple(
        BarSegment(key=part, name=text(f"part.{part}"), value=totals[part], colour=colour)
        for colour, part in enumerate(PARTS, 1)
        if totals.get(part)
    )
    return _single_bar("time-totals", text("time.totals"), segments) if segments else None


def phase_totals(traced: TraceWritten) -> BarFigure | None:
    """Seconds of the traced steps by phase; None where there are none."""
    segments = tuple(
        BarSegment(
            key=phase.name, name=known_text("phase", phase.name), value=phase.total_s, colour=colour
        )
        for colour, phase in enumerate(traced.phases, 1)
        if phase.total_s
    )
    return _single_bar("phases", text("trace"), segments) if segments else None


def comparison_figure(row: Comparison) -> BarFigure:
    """Estimated, predicted and measured value of one quantity."""
    values = {"estimated": row.estimated, "predicted": row.predicted, "measured": row.measured}
    bars = [
        _value_bar(key, value, show_quantity(row.quantity, value))
        for key, value in values.items()
        if value is not None or key != "estimated"
    ]
    if row.estimated is not None and row.interval is not None:
        low, high = (show_quantity(row.quantity, edge) for edge in row.interval)
        interval = {"interval": row.interval, "interval_label": f"{low} – {high}"}
        bars[0] = bars[0].model_copy(update=interval)
    return BarFigure(
        id=f"comparison-{row.quantity}", title=text(f"quantity.{row.quantity}"), bars=tuple(bars)
    )


def expectation_figure(row: Expectation) -> BarFigure:
    """Predicted and measured value of one quantity of the exchange."""
    show = show_bytes if row.quantity == "sent_bytes" else show_duration
    values = {"predicted": row.predicted, "measured": row.measured}
    return BarFigure(
        id=f"expectation-{row.quantity}",
        title=text(f"communication.quantity.{row.quantity}"),
        bars=tuple(
            _value_bar(key, value, "–" if value is None else show(value))
            for key, value in values.items()
        ),
    )


def confusion_figure(matrix: ConfusionMatrix) -> HeatmapFigure:
    """Counts shaded by their share of the true label; of many labels, the most frequent."""
    order = range(len(matrix.labels))
    shown = sorted(sorted(order, key=lambda i: -matrix.classes[i].support)[:_MOST_CLASSES])
    labels = tuple(matrix.labels[i] for i in shown)
    totals = tuple(matrix.classes[i].support for i in shown)
    return HeatmapFigure(
        id="confusion",
        title=text("confusion"),
        row_labels=labels,
        column_labels=labels,
        counts=tuple(tuple(matrix.counts[i][j] for j in shown) for i in shown),
        totals=totals,
        shades=tuple(
            # A root, because single mistakes are what people look for.
            tuple(math.sqrt(matrix.counts[i][j] / max(total, 1)) for j in shown)
            for i, total in zip(shown, totals, strict=True)
        ),
    )


def _raw_and_smoothed(key: str) -> dict[str, LineStyle]:
    return {key: "faint", f"{key}_smoothed": "line"}


def _marks(report: Report) -> tuple[EventMarks, ...]:
    """Where the loss was interfered with. Overflows are part of finding the loss scale: no marks."""
    steps: dict[str, set[int]] = {kind: set() for kind in ("skip", "rollback", "out_of_memory")}
    for incident in report.incidents:
        is_overflow = isinstance(incident, StepSkipped) and incident.reason == "overflow"
        if incident.kind in steps and not is_overflow:
            steps[incident.kind].add(incident.step)
    group = report.worker_group
    if group is not None:
        steps["fault"] = {fault.step for fault in group.faults if fault.step is not None}
        steps["regroup"] = {change.from_step for change in group.changes[1:]} - steps["fault"]
    return tuple(
        EventMarks(kind=kind, name=text(f"mark.{kind}"), x=tuple(sorted(at)[:_MOST_MARKS]))
        for kind, at in steps.items()
        if at
    )


def _line_figure(
    report: Report,
    title: BilingualText,
    styles: dict[str, LineStyle],
    *,
    unit: Unit = "number",
    marks: Sequence[EventMarks] = (),
    wide: bool = False,
    log: bool = False,
    prefer_log: bool = False,
) -> Iterator[LineFigure]:
    """The figure of these curves, if the run has any of them."""
    curves = [curve for key in styles if (curve := report.curve(key)) is not None]
    if not curves:
        return
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    has_log = log and bool(values) and min(values) > 0
    yield LineFigure(
        id=curves[0].key.replace("/", "-"),
        title=title,
        x=step_axis([step for curve in curves for step in curve.steps], text("step")),
        y=fit_axis(values, unit=unit, padding=_PADDING),
        log_y=fit_axis(values, unit=unit, log=True, padding=_PADDING) if has_log else None,
        scale="log" if has_log and prefer_log else "linear",
        series=tuple(
            Series(
                key=curve.key,
                name=_curve_name(curve),
                x=curve.steps,
                y=curve.values,
                colour=list(styles).index(curve.key) + 1,
                style=_style(curve, styles[curve.key], alone=len(curves) == 1),
            )
            for curve in curves
        ),
        marks=tuple(marks),
        wide=wide,
    )


def _curve_name(curve: Curve) -> BilingualText:
    prefix, _, metric = curve.key.partition("/")
    return known_text("metric", metric) if metric else known_text("series", prefix)


def _style(curve: Curve, wanted: LineStyle, *, alone: bool) -> LineStyle:
    """Dots that would touch become a line; so does a raw curve with no smoothed one over it."""
    dense = wanted == "dots" and len(curve.steps) > _MOST_DOTS
    return "line" if dense or (wanted == "faint" and alone) else wanted


def _single_bar(key: str, title: BilingualText, segments: tuple[BarSegment, ...]) -> BarFigure:
    bar = Bar(key=key, name=title, segments=segments)
    return BarFigure(id=key, title=title, unit="duration", bars=(bar,))


def _value_bar(key: str, value: float | None, label: str) -> Bar:
    name = text(f"bar.{key}")
    shown = value if value is not None and math.isfinite(value) else 0.0
    segment = BarSegment(key=key, name=name, value=shown)
    return Bar(key=key, name=name, segments=(segment,), label=label)
