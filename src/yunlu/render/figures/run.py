"""The charts of the page: which curves stand together, how they are drawn, what hovering reads out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from yunlu.jobs.recorded import PARTS
from yunlu.render.drawing.charts import (
    Band,
    Drawing,
    Mark,
    Series,
    draw_course,
    draw_lines,
    draw_stack,
)
from yunlu.render.format import metric_unit
from yunlu.render.i18n.texts import known_text, same, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.report_model import WorkerGroupHistory, WorkerGroupChange, Curve, Report
    from yunlu.render.drawing.charts import Style, Unit

_MOST_DOTS = 60
_MOST_MARKS = 200
_MOST_WORKERS = 8
COLOURS = 8


def both(key, otherwise):
    found = known_text(*key.rsplit(".", 1)) if key else same(otherwise)
    return found.en, found.zh


"""How many grounds and parts the page can tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart of the page: drawn once, or twice where a logarithmic scale helps."""

    id: str
    title: Markup
    unit: Unit
    legend: tuple[tuple[Markup, str], ...]
    """Names with the class of their key."""
    drawings: dict[str, Drawing]
    """By scale: ``linear``, ``log``."""
    points: dict[str, Any]
    """What hovering reads out."""
    scale: str = "linear"
    """The one shown first."""
    wide: bool = False
    axis: str = "step"
    """The word for what runs from left to right."""


def figures_of(report: Report) -> Iterator[Figure]:
    """Every chart that the run has curves for."""
    yield from _figure(
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
            title = known_text("metric", name)
            unit = metric_unit(name, curve.values)
            yield from _figure(report, title, {curve.key: "dots"}, unit=unit)
    yield from _figure(report, text("curve.lr"), {"lr": "line"})
    noisy: dict[str, Unit] = {
        "grad_norm": "number",
        "samples_per_s": "rate",
        "items_per_s": "rate",
        "tokens_per_s": "rate",
        "padding_share": "percent",
    }
    for key, unit in noisy.items():
        styles: dict[str, Style] = {key: "faint", f"{key}_smoothed": "line"}
        title = text(f"curve.{key}")
        yield from _figure(report, title, styles, unit=unit, log=key == "grad_norm")
    yield from _figure(report, text("curve.memory"), {"memory_bytes": "line"}, unit="bytes")
    noise: dict[str, Style] = {"noise_scale": "faint", "noise_scale_smoothed": "line"}
    # The batch may be a thousandth of the scale: on a linear axis it would lie on the floor.
    yield from _figure(
        report, text("curve.noise"), {**noise, "batch": "line"}, log=True, scale="log"
    )
    yield from _figure(report, text("curve.low_share"), {"low_share": "line"}, unit="percent")
    yield from _figure(
        report, text("curve.loss_scale"), {"loss_scale": "line"}, log=True, scale="log"
    )


def communication_figures(report: Report) -> Iterator[Figure]:
    """What exchanges took, sent and left out, over the steps."""
    units: dict[str, Unit] = {
        "exchange_s": "duration",
        "sent_bytes": "bytes",
        "compression_error": "percent",
    }
    for key, unit in units.items():
        styles: dict[str, Style] = {key: "faint", f"{key}_smoothed": "line"}
        yield from _figure(report, text(f"curve.{key}"), styles, unit=unit)


def _marks(report: Report) -> list[Mark]:
    """Where the loss was interfered with. Overflows are part of finding the loss scale: no marks."""
    steps: dict[str, set[int]] = {kind: set() for kind in ("skip", "rollback", "out_of_memory")}
    for each in report.incidents:
        if each.kind in steps and each.data.get("reason") != "overflow":
            steps[each.kind].add(each.step)
    worker_group = report.worker_group
    if worker_group is not None:
        steps["fault"] = {fault.step for fault in worker_group.faults if fault.step is not None}
        steps["crew"] = {change.from_step for change in worker_group.changes[1:]} - steps["fault"]
    return [
        Mark(kind=kind, steps=sorted(found)[:_MOST_MARKS]) for kind, found in steps.items() if found
    ]


def _figure(
    report: Report,
    title: Markup,
    styles: dict[str, Style],
    *,
    unit: Unit = "number",
    marks: Sequence[Mark] = (),
    wide: bool = False,
    log: bool = False,
    scale: str = "linear",
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
    legend = [(known_text("series", line.key), f"c{line.colour}") for line in lines]
    legend = legend if len(lines) > 1 else []
    legend += [(text(f"mark.{mark.kind}"), f"mark {mark.kind}") for mark in marks]
    yield Figure(
        id=found[0].key.replace("/", "-"),
        title=title,
        unit=unit,
        legend=tuple(legend),
        drawings={
            each: draw_lines(lines, unit=unit, log=each == "log", marks=marks) for each in scales
        },
        points={
            "unit": unit,
            "series": [_read_out(curve) for curve in found],
            "marks": [
                {"name": both(f"mark.{mark.kind}", mark.kind), "x": mark.steps} for mark in marks
            ],
        },
        scale=scale if scale in scales else "linear",
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
    name = both(f"series.{curve.key}", curve.key.removeprefix("validation/"))
    return {"name": name, "x": curve.steps, "y": values}


def time_figure(report: Report) -> Figure | None:
    """Where the time went, over the steps."""
    time = report.time
    if time is None or not time.steps:
        return None
    drawing = draw_stack(time.steps, [time.shares[part] for part in PARTS])
    series = [
        {
            "name": both(f"part.{part}", part),
            "x": time.steps,
            "y": [round(share, 5) for share in time.shares[part]],
        }
        for part in PARTS
    ]
    return Figure(
        id="time",
        title=text("time.over_steps"),
        unit="percent",
        legend=(),
        drawings={"linear": drawing},
        points={"unit": "percent", "series": series, "marks": []},
    )


def layout_colours(worker_group: WorkerGroupHistory) -> dict[str, int]:
    """The same colour for the same layout, however often the run came back to it."""
    layouts = dict.fromkeys(change.layout for change in worker_group.changes)
    return {layout: place % COLOURS + 1 for place, layout in enumerate(layouts)}


def course_figure(worker_group: WorkerGroupHistory) -> Figure | None:
    """How far the run was when, on the ground of its layouts."""
    if len(worker_group.elapsed_s) < 2:
        return None
    colours, times = layout_colours(worker_group), [round(each * 1000) for each in worker_group.elapsed_s]
    starts = [max(0, round(worker_group.elapsed_at(each.at) * 1000)) for each in worker_group.changes]
    starts[0] = 0
    bands = [
        Band(start=start, end=end, colour=colours[change.layout], label=change.layout)
        for change, start, end in zip(worker_group.changes, starts, [*starts[1:], times[-1]], strict=True)
    ]
    marks = _moments(worker_group)
    names: list[tuple[tuple[str, str], Sequence[int | str]]] = [
        (both("crew.course", "step"), worker_group.done_steps)
    ]
    # Each time with the layout it fell into: hovering reads it out.
    layouts = [next((b.label for b in reversed(bands) if b.start <= at), "") for at in times]
    names.append((both("crew.layout", "layout"), layouts))
    legend = [(Markup("{}").format(name), f"fill w{colour}") for name, colour in colours.items()]
    legend += [(text(f"mark.{mark.kind}"), f"mark {mark.kind}") for mark in marks]
    line = Series(
        key="course", points=list(zip(times, worker_group.done_steps, strict=True)), colour=1, style="line"
    )
    return Figure(
        id="course",
        title=text("crew.course_title"),
        unit="number",
        legend=tuple(legend),
        drawings={"linear": draw_course(line, bands=bands, marks=marks)},
        points={
            "unit": "number",
            "axis": "time",
            "series": [{"name": name, "x": times, "y": values} for name, values in names],
            "marks": [
                {"name": both(f"mark.{mark.kind}", mark.kind), "x": mark.steps} for mark in marks
            ],
        },
        wide=True,
        axis="crew.time",
    )


def _moments(worker_group: WorkerGroupHistory) -> list[Mark]:
    """Faults, stragglers and changes that nobody was lost for, in milliseconds."""
    found = {
        "fault": [each.at for each in worker_group.faults],
        "straggler": [each.at for each in worker_group.stragglers],
        "crew": [each.at for each in _unforced(worker_group)],
    }
    return [
        Mark(kind=kind, steps=sorted(round(worker_group.elapsed_at(at) * 1000) for at in ats)[:_MOST_MARKS])
        for kind, ats in found.items()
        if ats
    ]


def _unforced(worker_group: WorkerGroupHistory) -> Iterator[WorkerGroupChange]:
    for before, change in pairwise(worker_group.changes):
        if not any(before.at <= fault.at <= change.at for fault in worker_group.faults):
            yield change


def workers_figure(worker_group: WorkerGroupHistory) -> Figure | None:
    """What each worker's step takes without the waiting: one that is slow stands out."""
    found = [worker for worker in worker_group.workers if len(worker.steps) > 1]
    # The slowest are what people look for.
    found = sorted(found, key=lambda each: -median(each.compute_s))[:_MOST_WORKERS]
    found.sort(key=lambda each: list(worker_group.workers).index(each))
    if not found:
        return None
    lines = [
        Series(
            key=f"worker-{worker.worker}",
            points=list(zip(worker.steps, worker.compute_s, strict=True)),
            colour=place,
        )
        for place, worker in enumerate(found, 1)
    ]
    names = [
        (text("crew.worker", worker=each.worker).en, text("crew.worker", worker=each.worker).zh)
        for each in found
    ]
    drawing = draw_lines(lines, unit="duration")
    return Figure(
        id="workers",
        title=text("crew.step_time"),
        unit="duration",
        legend=tuple(
            (text("crew.worker", worker=each.worker), f"w{place}")
            for place, each in enumerate(found, 1)
        ),
        drawings={"linear": drawing},
        points={
            "unit": "duration",
            "series": [
                {"name": name, "x": each.steps, "y": [float(f"{v:.4g}") for v in each.compute_s]}
                for name, each in zip(names, found, strict=True)
            ],
            "marks": [],
        },
        wide=True,
    )
