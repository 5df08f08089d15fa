"""Figures of a run and its plan options: curves, time split, comparisons, workers, cost against time."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_duration
from yunlu.jobs.step_summary import PARTS
from yunlu.planning.layouts import AXES
from yunlu.render.figure_values import (
    NUM_COLOURS,
    Band,
    Bar,
    BarFigure,
    BarSegment,
    CostTimeFigure,
    EventMarks,
    HeatmapFigure,
    LayoutFigure,
    LineFigure,
    OptionPoint,
    RankTile,
    Series,
    StackFigure,
    StackLayer,
    fit_axis,
    step_axis,
)
from yunlu.render.format import metric_unit, show_quantity
from yunlu.render.i18n import known_text, same, text
from yunlu.runs.events import StepSkipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.communication import Expectation
    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.jobs.report_model import (
        Comparison,
        ConfusionMatrix,
        Curve,
        Report,
        WorkerGroupHistory,
    )
    from yunlu.planning.plan import Plan
    from yunlu.render.figure_values import LineStyle, Unit
    from yunlu.render.i18n import BilingualText
    from yunlu.runs.events import TraceWritten, WorkerRank
    from yunlu.runs.fold import GroupGeneration

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


_MOST_WORKERS = 8
_LONG_ROW = 4


def progress_figure(group: WorkerGroupHistory) -> LineFigure | None:
    """Completed steps over time, on the background of the layouts."""
    if len(group.elapsed_s) < 2:
        return None
    colours, end = _layout_colours(group), group.elapsed_s[-1]
    starts = [max(0.0, group.elapsed_at(change.at)) for change in group.changes]
    starts[0] = 0.0
    line = Series(
        key="progress",
        name=text("workers.progress"),
        x=tuple(round(at, 3) for at in group.elapsed_s),
        y=group.done_steps,
    )
    return LineFigure(
        id="progress",
        title=text("workers.progress_title"),
        x=fit_axis(line.x, unit="duration", ticks=5, name=text("workers.time")),
        y=fit_axis(line.y, unit="count", from_zero=True, padding=_PADDING, ticks=5),
        series=(line,),
        marks=tuple(_moments(group)),
        bands=tuple(
            Band(start=start, end=stop, label=change.layout, colour=colours[change.layout])
            for change, start, stop in zip(group.changes, starts, [*starts[1:], end], strict=True)
        ),
        bands_name=text("workers.layout"),
        wide=True,
    )


def step_time_figure(group: WorkerGroupHistory) -> LineFigure | None:
    """Step time of each worker without waiting: a slow one stands out."""
    timed = [worker for worker in group.workers if len(worker.steps) > 1]
    # The slowest are what people look for.
    slowest = sorted(timed, key=lambda worker: -median(worker.compute_s))[:_MOST_WORKERS]
    shown = [worker for worker in timed if worker in slowest]
    if not shown:
        return None
    return LineFigure(
        id="workers",
        title=text("workers.step_time"),
        x=step_axis([step for worker in shown for step in worker.steps], text("step")),
        y=fit_axis(
            [value for worker in shown for value in worker.compute_s],
            unit="duration",
            padding=_PADDING,
        ),
        series=tuple(
            Series(
                key=f"worker-{worker.worker}",
                name=text("workers.worker", worker=worker.worker),
                x=worker.steps,
                y=worker.compute_s,
                colour=colour,
            )
            for colour, worker in enumerate(shown, 1)
        ),
        palette="workers",
        wide=True,
    )


def worker_bars(group: WorkerGroupHistory) -> BarFigure:
    """Step time of each worker, split into computing and waiting."""
    return BarFigure(
        id="worker-bars",
        title=text("workers.each"),
        unit="duration",
        bars=tuple(
            Bar(
                key=worker.worker,
                name=same(worker.worker),
                segments=(
                    BarSegment(
                        key="compute",
                        name=text("workers.compute"),
                        value=(worker.step_s or 0.0) - wait_s,
                    ),
                    BarSegment(key="wait", name=text("workers.waiting"), value=wait_s),
                ),
                label="–" if worker.step_s is None else show_duration(worker.step_s),
            )
            for worker in group.workers
            for wait_s in (min(worker.wait_s or 0.0, worker.step_s or 0.0),)
        ),
    )


def layout_figure(group: WorkerGroupHistory, change: GroupGeneration) -> LayoutFigure:
    """The ranks of one generation at their positions in the layout."""
    sizes = {
        axis: max((getattr(rank, axis) for rank in change.ranks), default=0) + 1 for axis in AXES
    }
    lost = {fault.rank: fault.cause for fault in group.faults if fault.struck == change.key}
    at_position = {(rank.dp, rank.pp, rank.fsdp, rank.tp): rank for rank in change.ranks}
    cells = tuple(
        tuple(
            tuple(
                _tile(at_position.get((dp, pp, fsdp, tp)), sizes, lost)
                for fsdp in range(sizes["fsdp"])
                for tp in range(sizes["tp"])
            )
            for pp in range(sizes["pp"])
        )
        for dp in range(sizes["dp"])
    )
    # A long row of replicas or shards is folded: nobody scrolls through thirty tiles.
    is_folded = sizes["pp"] == 1 and sizes["dp"] > _LONG_ROW
    shards, slices = sizes["fsdp"], sizes["tp"]
    across = math.ceil(math.sqrt(shards / slices)) if shards > _LONG_ROW else 1
    following = next((later for later in group.changes if later.key > change.key), None)
    return LayoutFigure(
        id=f"layout-{change.attempt}-{change.generation}",
        layout=change.layout,
        colour=_layout_colours(group)[change.layout],
        first_step=change.from_step + 1,
        last_step=following.from_step if following else None,
        sizes=sizes,
        stages=tuple(change.stages[pp :: sizes["pp"]] for pp in range(sizes["pp"])),
        cells=cells,
        columns=min(math.ceil(math.sqrt(sizes["dp"])), 8) if is_folded else sizes["pp"],
        tile_columns=slices * across,
        has_replica_rows=sizes["dp"] > 1 and not is_folded,
        colour_meaning=_colour_meaning(stages=sizes["pp"], parts=shards * slices),
        notes=tuple(
            text(f"layout.split.{axis}", count=sizes[axis])
            for axis in ("dp", "fsdp", "tp", "pp")
            if sizes[axis] > 1
        ),
    )


def _layout_colours(group: WorkerGroupHistory) -> dict[str, int]:
    """The same colour for the same layout, however often the run came back to it."""
    layouts = dict.fromkeys(change.layout for change in group.changes)
    return {layout: index % NUM_COLOURS + 1 for index, layout in enumerate(layouts)}


def _colour_meaning(*, stages: int, parts: int) -> BilingualText:
    if stages * parts <= NUM_COLOURS:
        return text("layout.colours")
    is_distinct = parts <= NUM_COLOURS
    return text("layout.colours_in_stage" if is_distinct else "layout.colours_repeat")


def _tile(
    rank: WorkerRank | None, sizes: dict[str, int], lost: dict[int | None, str]
) -> RankTile | None:
    if rank is None:
        return None
    # The same colour wherever the same part of the weights lies.
    part = (rank.pp * sizes["fsdp"] + rank.fsdp) * sizes["tp"] + rank.tp
    replicas = sizes["dp"] * sizes["fsdp"]
    holds: list[BilingualText] = []
    if sizes["fsdp"] > 1:
        holds.append(text("layout.shard", this=rank.fsdp + 1, all=sizes["fsdp"]))
    if sizes["tp"] > 1:
        holds.append(text("layout.slice", this=rank.tp + 1, all=sizes["tp"]))
    if replicas > 1:
        share = rank.dp * sizes["fsdp"] + rank.fsdp + 1
        holds.append(text("layout.samples", this=share, all=replicas))
    return RankTile(
        rank=rank.rank,
        worker=rank.worker,
        host=rank.host,
        pid=rank.pid,
        colour=part % NUM_COLOURS + 1,
        holds=tuple(holds),
        lost=known_text("fault", lost[rank.rank]) if rank.rank in lost else None,
    )


def _moments(group: WorkerGroupHistory) -> Iterator[EventMarks]:
    """Faults, stragglers, and changes of the layout that no fault forced."""
    instants = {
        "fault": [fault.at for fault in group.faults],
        "straggler": [straggler.at for straggler in group.stragglers],
        "regroup": [change.at for change in _unforced(group)],
    }
    for kind, ats in instants.items():
        if ats:
            elapsed = sorted(round(group.elapsed_at(at), 3) for at in ats)
            yield EventMarks(kind=kind, name=text(f"mark.{kind}"), x=tuple(elapsed[:_MOST_MARKS]))


def _unforced(group: WorkerGroupHistory) -> Iterator[GroupGeneration]:
    for before, change in pairwise(group.changes):
        if not any(before.at <= fault.at <= change.at for fault in group.faults):
            yield change


_HOUR_S = 3600


def plan_options_figure(outcome: PlanOutcome, *, title: str) -> CostTimeFigure:
    """All candidates with a price, their Pareto front, and the options with their intervals."""
    # What costs nothing has no place on a logarithmic axis.
    priced = [(hours, dollars) for hours, dollars, _ in outcome.candidates if dollars > 0]
    front, options = find_front(priced), [_option_point(option) for option in outcome.options]
    # What is far dearer and slower than options and front only squeezes the rest.
    shown = [(option.hours[1], option.dollars[1]) for option in options if option] + front
    return CostTimeFigure(
        title=f"{title}: cost and time of its options (bars: 10 to 90 %)",
        candidates=tuple(priced),
        front=tuple(front),
        options=tuple(options),
        hours=(min(at[0] for at in shown) / 2, max(at[0] for at in shown) * 3) if shown else None,
        dollars=(min(at[1] for at in shown) / 2, max(at[1] for at in shown) * 4) if shown else None,
    )


def find_front(candidates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both cost and time, the quickest first."""
    front: list[tuple[float, float]] = []
    for candidate in sorted(candidates):
        if not front or candidate[1] < front[-1][1]:
            front.append(candidate)
    return front


def _option_point(option: Plan) -> OptionPoint | None:
    dollars = option.dollars
    if dollars is None or dollars.value <= 0:
        return None
    hours = option.total_s.times(1 / _HOUR_S)
    hardware = option.hardware
    return OptionPoint(
        name=f"{hardware.devices} x {hardware.device}, {hardware.cloud}",
        hours=(hours.low, hours.value, hours.high),
        dollars=(dollars.low, dollars.value, dollars.high),
    )
