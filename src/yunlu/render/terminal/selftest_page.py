"""What ``yunlu selftest`` shows: a bar meanwhile, then a table of checks and one of figures."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from yunlu.core.units import show_bytes, show_duration
from yunlu.render.terminal.page import ACCENT, indented, plain_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

    from yunlu.jobs.selftest import SelftestCheck, SelftestProgress, SelftestResult

_MARKS = {
    "ok": ("✓ ok", "green"),
    "failed": ("✗ failed", "bold red"),
    "skipped": ("– skipped", "yellow"),
}
_TITLES = {
    "cpu": "the same job on the CPU",
    "text": "language model",
    "resume": "stop, resume",
    "kill": "kill a worker",
    "dp": "replicas",
    "fsdp": "sharded weights",
    "tp": "cut matrices",
    "pp": "pipeline",
    "fsdp+tp": "both",
    "image": "images",
    "table": "table",
}


@contextmanager
def selftest_progress(console: Console) -> Generator[Callable[[SelftestProgress], None]]:
    """A bar that names the check under way."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    bar = progress.add_task("starting", total=None)

    def show(begun: SelftestProgress) -> None:
        progress.start()
        name = f"{begun.check}: {_TITLES.get(begun.check, begun.check)}"
        counted = f" ({begun.index + 1} of {begun.of})" if begun.of else ""
        total = begun.of or None
        progress.update(bar, description=name + counted, completed=begun.index, total=total)

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()


def selftest_page(result: SelftestResult, file: str) -> RenderableType:
    """The result for people."""
    measured = [check for check in result.checks if check.figures is not None]
    figures = (
        (Text("\n Measured, × what the plan predicted", "bold cyan"), indented(_figures(measured)))
        if measured
        else ()
    )
    return Group(_title(result), indented(_checks(result.checks)), *figures, _ending(result, file))


def _title(result: SelftestResult) -> Text:
    device = result.device or result.kind
    worker = "worker" if result.devices == 1 else "workers"
    devices = (
        f"{result.devices} {worker} on {device}"
        if result.kind == "cpu"
        else f"{result.devices} × {device}"
    )
    torch = result.packages.get("torch", "?")
    return Text.assemble(
        ("\n 云炉 ", f"bold {ACCENT}"),
        (" self-test", "bold"),
        (f"  {devices} · {result.kind} · torch {torch}\n", "dim"),
    )


def _checks(checks: Sequence[SelftestCheck]) -> Table:
    table = plain_table()
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.outcome]
        time = show_duration(check.seconds) if check.outcome != "skipped" else ""
        detail = Text(check.detail, style="red" if check.outcome == "failed" else "")
        table.add_row(_name(check), Text(mark, style=style), time, detail)
    return table


def _name(check: SelftestCheck) -> Text:
    is_shown = check.outcome != "skipped" and check.layout != "single"
    layout = f" {check.layout.removeprefix(check.name)}" if is_shown else ""
    return Text.assemble(check.name, (layout, "dim"))


def _figures(checks: Sequence[SelftestCheck]) -> Table:
    table = plain_table()
    table.add_column("check", no_wrap=True)
    for name in ("peak memory", "", "step", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for check in checks:
        figures = check.figures
        assert figures is not None
        table.add_row(
            check.name,
            show_bytes(figures.memory_bytes),
            _ratio(figures.memory_bytes, figures.predicted_memory_bytes),
            show_duration(figures.step_s),
            _ratio(figures.step_s, figures.predicted_step_s),
        )
    return table


def _ratio(measured: float, predicted: float) -> str:
    return f"× {measured / predicted:.2f}" if predicted > 0 else "–"


def _ending(result: SelftestResult, file: str) -> Text:
    failed, skipped = result.count("failed"), result.count("skipped")
    took = f"  {result.count('ok')} ok, {skipped} skipped, in {show_duration(result.took_s)}"
    if failed:
        text = Text(f"\n ✗ {failed} of {len(result.checks)} checks failed.", style="bold red")
        send = f"\n   Send this file with your report: versions, results, logs, no secrets.\n   {file}\n"
    else:
        text = Text("\n ✓ This machine trains as it should.", style="bold green")
        send = f"\n   Every figure, and worth sending to us, too:\n   {file}\n"
    return text.append(took, style="not bold dim").append(send, style="not bold default")
