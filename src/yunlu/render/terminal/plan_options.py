"""A job, its plan options and its predictions as tables, and the progress of measuring it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.render.terminal.event_lines import describe
from yunlu.render.terminal.page import ACCENT, indented, plain_table
from yunlu.render.terminal.run_display import DisplayedProgress
from yunlu.runs.events import DataOpened, ModelBuilt, ProgressReported, WarningRaised

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.console import Console, RenderableType

    from yunlu.jobs.predict_table import PredictedRow
    from yunlu.planning.plan import Interval, Plan, Rehearsal
    from yunlu.planning.search.options import PlanOptions
    from yunlu.runs.events import Event
    from yunlu.spec.job import Job

_GIB = 2**30
_MANY_DOLLARS = 1e7
_MANY = 1e6
_UNITS = (
    *(("s", 1.0, 90), ("min", 60.0, 90), ("h", 3600.0, 48), ("d", 86400.0, 1000)),
    ("years", 365.25 * 86400.0, math.inf),
)
"""A unit, its seconds, and up to how many of them it is used."""


def options_table(options: PlanOptions) -> RenderableType:
    """One option a row: the expected value, and below it the interval; then why each won or lost."""
    table = plain_table()
    table.add_column("")
    for title in ("hardware", "layout"):
        table.add_column(title, overflow="fold")
    for title in ("memory", "pace", "time", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, option in enumerate(options, start=1):
        label = Text(f"{number}", style=f"bold {ACCENT}" if number == 1 else "dim")
        table.add_row(label, *_cells(option))
    why = Table.grid(padding=(0, 3, 0, 0))
    for number, option in enumerate(options, start=1):
        style = f"bold {ACCENT}" if number == 1 else "dim"
        why.add_row(Text(f"{number}", style=style), Text(option.reason))
    return Group(indented(table), Text(""), indented(why))


def notes_block(options: PlanOptions, *, took_s: float) -> RenderableType:
    """Problems, assumptions, and the number of layouts that were compared."""
    lines = [Text(f" {problem}", style="red") for problem in options.problems]
    lines += [Text(f" note: {note}", style="dim") for note in options.notes]
    best = options.best
    if best.lr_factor != 1.0:
        text = f" note: the learning rate is multiplied by {best.lr_factor:.3g} ({best.lr_scaling})"
        lines.append(Text(text, style="dim"))
    count = f" {options.layouts:,} layouts in {took_s:.2f} s of computing; below each figure, its 10 to 90 % interval"
    return Group(Text(""), *lines, Text(count, style="dim"))


def rehearsal_block(plan: Plan, rehearsal: Rehearsal) -> RenderableType:
    """Rehearsed memory of a worker of each stage, by what takes it, beside the prediction."""
    names = dict.fromkeys(name for rank in rehearsal.ranks for name in rank.parts)
    table = plain_table()
    for title in ("rehearsed", "peak", *names):
        table.add_column(title, justify="left" if title == "rehearsed" else "right")
    for rank in rehearsal.ranks:
        parts = (show_bytes(rank.parts.get(name, 0)) for name in names)
        table.add_row(f"worker {rank.rank}", show_bytes(rank.peak_bytes), *parts)
    room = plan.hardware.memory_bytes
    lines = [
        (
            f" predicted {show_bytes(plan.prediction.memory_bytes)} with libraries and buffers, "
            f"of {show_bytes(room)}"
        ),
        (
            f" one step of {plan.layout} on fake tensors with kernels of {rehearsal.kernels}, in "
            f"{rehearsal.cpu_s:.1f} s of computing: no error of shape, device or sharding"
        ),
    ]
    if rehearsal.peak_bytes > room > 0:
        lines.insert(0, " the tensors alone do not fit into the memory of the device")
    return Group(Text(""), indented(table), *(Text(line, style="dim") for line in lines))


def comparison_table(names: Sequence[str], options: Sequence[Plan]) -> RenderableType:
    """Two jobs' best options beside each other."""
    table = plain_table()
    for title in ("", *names, "second / first"):
        table.add_column(title, overflow="fold")
    first, second = options
    for label, show in _TEXTS.items():
        table.add_row(Text(label, style="dim"), show(first), show(second), "")
    for label, (figure, show) in _FIGURES.items():
        one, other = figure(first), figure(second)
        table.add_row(Text(label, style="dim"), *(_both(interval, show) for interval in (one, other)),
                      _ratio(one, other))  # fmt: skip
    return indented(table)


def show_dollars(dollars: float) -> str:
    """Cents where they matter; beyond ten million, no more digits than are known."""
    if dollars >= _MANY_DOLLARS:
        return f"${show_count(dollars)}"
    return f"${dollars:,.2f}" if dollars < 100 else f"${dollars:,.0f}"


def share_out(option: Plan) -> str:
    """A batch as replicas x micro-batch x passes, and what the last pass has where it is not full."""
    batch, pass_size = option.batch, option.layout.replicas * option.micro_batch
    full, left = divmod(batch, pass_size)
    share = f"{option.layout.replicas} x {option.micro_batch}"
    if not full:
        return f"{batch} < {share}"
    return f"{batch} = {share} x {full}" + (f" + {left}" if left else "")


_TEXTS: dict[str, Callable[[Plan], str]] = {
    "hardware": lambda option: (
        f"{option.hardware} ({option.hardware.devices} x {option.hardware.device})"
    ),
    "layout": lambda option: str(option.layout),
    "batch": share_out,
    "recompute": lambda option: option.recompute,
    "precision": lambda option: option.precision,
    "steps": lambda option: f"{option.steps:,}",
}
_FIGURES: dict[str, tuple[Callable[[Plan], Interval | None], Callable[[float], str]]] = {
    "memory of a device": (lambda option: option.memory_bytes, show_bytes),
    "a step": (lambda option: option.step_s, show_duration),
    "samples/s": (lambda option: option.samples_per_s, show_count),
    "tokens/s": (lambda option: option.tokens_per_s, show_count),
    "time": (lambda option: option.total_s, show_duration),
    "cost": (lambda option: option.dollars, show_dollars),
}


def _cells(option: Plan) -> list[Text]:
    memory, room = option.memory_bytes, option.hardware.memory_bytes
    pace, unit = option.samples_per_s, "samples/s"
    if option.tokens_per_s is not None:
        pace, unit = option.tokens_per_s, "tokens/s"
    scale, name = (_GIB, "GiB") if room >= _GIB else (2**20, "MiB")
    value, most, high = (_digits(size / scale) for size in (memory.value, room, memory.high))
    cost = ("unknown", "")
    if option.dollars is not None:
        cost = show_dollars(option.dollars.value), _range(option.dollars, show_dollars)
    return [
        _two(str(option.hardware), "\n".join(_about(option))),
        _two(*_how(option)),
        _two(f"{value} of {most} {name}", f"≤ {high}, {max(option.headroom, 0):.0%} free"),
        _two(f"{show_count(pace.value)} {unit}", _range(pace, show_count)),
        _two(*_spans(option.total_s)),
        _two(*cost),
    ]


def _about(option: Plan) -> list[str]:
    """Devices, price and region of the hardware."""
    hardware = option.hardware
    hourly = hardware.dollars_per_hour
    price = "price unknown" if hourly is None else f"{show_dollars(hourly)}/h"
    where = f" · {hardware.region}" if hardware.region not in {"", hardware.cloud} else ""
    return [f"{hardware.devices} x {hardware.device}", f"{price}{where}"]


def _how(option: Plan) -> tuple[str, str]:
    layout = str(option.layout) + (", zero1" if option.layout.zero1 else "")
    again = "" if option.recompute == "none" else f", recompute {option.recompute}"
    return layout, f"batch {share_out(option)}\n{option.precision}{again}"


def _spans(interval: Interval) -> tuple[str, str]:
    """A time and its interval, in the unit that suits it."""
    fitting = (scale for scale in _UNITS if interval.value < scale[2] * scale[1])
    unit, size, _ = next(fitting, _UNITS[-1])
    bounds = (interval.value, interval.low, interval.high)
    value, low, high = (_digits(bound / size) for bound in bounds)
    return f"{value} {unit}", f"{low}–{high} {unit}"


def _digits(figure: float) -> str:
    """Three digits, or all before the point."""
    if figure >= _MANY:
        return show_count(figure)
    return f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}"


def _two(above: str, below: str) -> Text:
    return Text.assemble((above, "bold"), "\n", (below, "dim"))


def _range(interval: Interval, show: Callable[[float], str]) -> str:
    return f"{show(interval.low)}–{show(interval.high)}"


def _both(interval: Interval | None, show: Callable[[float], str]) -> str:
    return "–" if interval is None else f"{show(interval.value)} ({_range(interval, show)})"


def _ratio(one: Interval | None, other: Interval | None) -> str:
    if one is None or other is None or one.value <= 0:
        return ""
    return f"x {other.value / one.value:.2f}"


_TITLES = (
    "row",
    "model",
    "tokens/s a device",
    "10 to 90 %",
    "a step",
    "peak memory",
    "10 to 90 %",
    "fits",
)


def rows_table(rows: Sequence[PredictedRow]) -> RenderableType:
    """One line for each row: its prediction, or why there is none."""
    table = plain_table()
    for title in _TITLES:
        table.add_column(title, justify="left" if title in {"model", "fits"} else "right")
    for row in rows:
        number = str(row.row + 1)
        if row.reason:
            reason = Text(row.reason, style="yellow")
            table.add_row(number, row.model, "–", "", "", "", "", reason)
            continue
        table.add_row(
            number,
            row.model,
            _count(row.tokens_per_s_per_device),
            f"{_count(row.tokens_per_s_per_device_p10)}–{_count(row.tokens_per_s_per_device_p90)}",
            show_duration(row.step_time_s or 0.0),
            show_bytes(row.peak_memory_bytes or 0.0),
            f"{show_bytes(row.peak_memory_bytes_p10 or 0.0)}–"
            f"{show_bytes(row.peak_memory_bytes_p90 or 0.0)}",
            "yes" if row.fits else "no",
        )
    return indented(table)


def _count(value: float | None) -> str:
    return f"{value or 0.0:,.0f}"


@contextmanager
def measure_progress(console: Console) -> Generator[Callable[[Event], None]]:
    """A status line with the current phase; data, model and warnings stay above it."""
    progress = DisplayedProgress()
    with console.status("starting") as status:

        def show(event: Event) -> None:
            if isinstance(event, ProgressReported):
                status.update(Text(event.phase))
            elif isinstance(event, DataOpened | ModelBuilt | WarningRaised):
                console.print(describe(event, progress))

        yield show


def job_summary(job: Job) -> str:
    """How a job was read, one line for each part."""
    lines = {
        "name": job.name or "–",
        "task": job.task,
        "model": _with_details(job.model.name, job.model.args),
        "data": _describe_data(job),
        "goal": _describe_goal(job),
        "optimiser": _with_details(job.train.optimizer.name, _set_by_user(job.train.optimizer)),
        "schedule": _with_details(job.train.schedule.name, _set_by_user(job.train.schedule)),
        "trackers": ", ".join(["tensorboard", *job.trackers]),
    }
    return "\n".join(f"  {name:<10}{text}" for name, text in lines.items())


def _describe_data(job: Job) -> str:
    data = job.data
    parts = [data.train]
    for name, path, share in (
        ("validation", data.validation, data.split.validation),
        ("test", data.test, data.split.test),
    ):
        parts.append(f"{name} {path}" if path else f"{share * 100:.3g} % held out for {name}")
    if data.target:
        parts.append(f"target {data.target}")
    return ", ".join(parts)


def _describe_goal(job: Job) -> str:
    train = job.train
    length = f"{train.steps} steps" if train.steps else f"{show_number(train.epochs or 10)} epochs"
    stop = train.early_stopping
    parts = [length, f"batch {train.batch}", f"precision {train.precision}"]
    if stop:
        parts.append(f"stops early after {stop.patience} evaluations without improvement")
    return ", ".join(parts)


def _with_details(name: str, details: dict[str, Any]) -> str:
    text = ", ".join(f"{key} {value}" for key, value in details.items() if key != "name")
    return f"{name} ({text})" if text else name


def _set_by_user(spec: Any) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True)
