"""A job, its plan options and its predictions as tables, and the progress of measuring it."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from yunlu.core.units import (
    estimate_count,
    estimate_dollars,
    estimate_time,
    show_bytes,
    show_count,
    show_duration,
    show_number,
)
from yunlu.render.terminal.event_lines import describe
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import (
    ACCENT,
    has_width,
    in_language,
    indented,
    padded_label,
    plain_table,
)
from yunlu.render.terminal.run_display import DisplayedProgress
from yunlu.runs.events import DataOpened, ModelBuilt, ProgressReported, WarningRaised

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rich.console import Console, RenderableType

    from yunlu.jobs.predict_table import PredictedRow
    from yunlu.planning.plan import Interval, Plan, Rehearsal
    from yunlu.planning.search.options import PlanOptions
    from yunlu.runs.events import Event
    from yunlu.spec.job import Job

_GIB = 2**30
_MANY_DOLLARS = 1e7
_MANY = 1e6
_SHARE = re.compile(r" {4}(\S.{19})(.*)")
"""A component, and how much of the whole it is."""
_LAYOUT = re.compile(r"(\S.*\): )(.*)")
"""The first line of an option: hardware, then how it is used."""
_WIDE = 120
"""Columns from which options stand side by side."""


def options_table(options: PlanOptions, *, width: int) -> RenderableType:
    """One option a row where there is room for it, else one below the other."""
    return _table_of(options) if width >= _WIDE else Group(*_blocks_of(options))


def _table_of(options: PlanOptions) -> RenderableType:
    """One option a row: the expected value, and below it the interval; then why each won or lost."""
    table = plain_table()
    table.add_column("")
    for title in ("hardware", "layout"):
        table.add_column(title, overflow="fold")
    for title in ("memory", "pace", "time", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, option in enumerate(options, start=1):
        table.add_row(_number(number), *(_two(*figure) for figure in _figures(option).values()))
    why = Table.grid(padding=(0, 3, 0, 0))
    for number, option in enumerate(options, start=1):
        why.add_row(_number(number), Text(option.reason))
    return Group(indented(table), Text(""), indented(why))


def _blocks_of(options: PlanOptions) -> Iterator[RenderableType]:
    """An option after the other, a figure a line."""
    for number, option in enumerate(options, start=1):
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        figures = _figures(option)
        hardware, more = figures.pop("hardware")
        head = Text.assemble(" ", _number(number), "  ", (hardware, "bold"))
        for title, (value, below) in figures.items():
            line = Text(value, style="bold")
            if below:
                line.append(f"  {below.replace(_BELOW, ' · ')}", style="not bold dim")
            grid.add_row(title, Hanging(line, hang=0))
        grid.add_row("why", Text(option.reason))
        yield Text("") if number > 1 else Text()
        yield head
        about = Hanging(Text(more.replace(_BELOW, " · "), style="dim"), hang=0)
        yield Padding(about, (0, 0, 0, 4))
        yield Padding(grid, (0, 0, 0, 4), expand=False)


def _number(number: int) -> Text:
    return Text(f"{number}", style=f"bold {ACCENT}" if number == 1 else "dim")


def notes_block(options: PlanOptions, *, took_s: float) -> RenderableType:
    """Problems, assumptions, and the number of layouts that were compared."""
    lines = [Hanging(Text(f" {problem}", style="red")) for problem in options.problems]
    lines += [Hanging(Text(f" note: {note}", style="dim")) for note in options.notes]
    best = options.best
    if best.lr_factor != 1.0:
        text = f" note: the learning rate is multiplied by {best.lr_factor:.3g} ({best.lr_scaling})"
        lines.append(Hanging(Text(text, style="dim")))
    count = f" {options.layouts:,} layouts in {took_s:.2f} s of computing; with each figure, its 10 to 90 % interval"
    return Group(Text(""), *lines, Hanging(Text(count, style="dim"), hang=1))


def explained_lines(options: PlanOptions, console: Console) -> Iterator[Text]:
    """Where memory and time go; a long command over several lines, as a shell takes them."""
    choices = {
        f"  {choice.name} {choice.value}: {choice.reason}": choice
        for option in options.options
        for choice in option.choices
    }
    for written in options.explain().splitlines():
        line = written
        if (choice := choices.get(line)) is not None:
            name = in_language(choice.name, is_label=True)
            line = f"  {name} {choice.value}: {in_language(choice.reason)}"
        elif share := _SHARE.fullmatch(line):
            line = f"    {padded_label(share[1].rstrip(), 20)}{share[2]}"
        elif layout := _LAYOUT.fullmatch(line):
            line = layout[1] + ", ".join(in_language(part) for part in layout[2].split(", "))
        if has_width(console) and len(line) >= console.width:
            yield Text(f" {line}".replace(" --set ", " \\\n       --set "))
        else:
            yield Text(f" {line}")


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
    notes = (Hanging(Text(line, style="dim")) for line in lines)
    return Group(Text(""), indented(table), *notes)


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
_FIGURES: dict[
    str, tuple[Callable[[Plan], Interval | None], Callable[[float, float, float], tuple[str, str]]]
] = {
    "memory of a device": (
        lambda option: option.memory_bytes,
        lambda value, low, high: (
            show_bytes(value),
            f"{show_bytes(low)}–{show_bytes(high)}",
        ),
    ),
    "a step": (lambda option: option.step_s, estimate_time),
    "samples/s": (lambda option: option.samples_per_s, estimate_count),
    "tokens/s": (lambda option: option.tokens_per_s, estimate_count),
    "time": (lambda option: option.total_s, estimate_time),
    "cost": (lambda option: option.dollars, estimate_dollars),
}
_BELOW = "\n"


def _figures(option: Plan) -> dict[str, tuple[str, str]]:
    """By title: what is predicted or chosen, and below it the interval or more about it."""
    memory, room = option.memory_bytes, option.hardware.memory_bytes
    pace, unit = option.samples_per_s, "samples/s"
    if option.tokens_per_s is not None:
        pace, unit = option.tokens_per_s, "tokens/s"
    speed, speeds = estimate_count(*pace.edges)
    scale, name = (_GIB, "GiB") if room >= _GIB else (2**20, "MiB")
    value, most, high = (_digits(size / scale) for size in (memory.value, room, memory.high))
    cost = ("unknown", "")
    if option.dollars is not None:
        cost = estimate_dollars(*option.dollars.edges)
    return {
        "hardware": (str(option.hardware), _BELOW.join(_about(option))),
        "layout": _how(option),
        "memory": (f"{value} of {most} {name}", f"≤ {high}, {max(option.headroom, 0):.0%} free"),
        "pace": (f"{speed} {unit}", speeds),
        "time": estimate_time(*option.total_s.edges),
        "cost": cost,
    }


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
    return layout, f"batch {share_out(option)}{_BELOW}{option.precision}{again}"


def _digits(figure: float) -> str:
    """Three digits, or all before the point."""
    if figure >= _MANY:
        return show_count(figure)
    return f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}"


def _two(above: str, below: str) -> Text:
    return Text.assemble((above, "bold"), "\n", (below, "dim"))


def _both(interval: Interval | None, show: Callable[[float, float, float], tuple[str, str]]) -> str:
    if interval is None:
        return "–"
    value, between = show(*interval.edges)
    return f"{value} ({between})" if between else value


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
    table = plain_table(lead=2)
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
    width = max(10, *(cell_len(in_language(name, is_label=True)) + 1 for name in lines))
    return "\n".join(f"  {padded_label(name, width)}{text}" for name, text in lines.items())


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
    return ", ".join(in_language(part) for part in parts)


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
