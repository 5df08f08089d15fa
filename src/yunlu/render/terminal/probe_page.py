"""What ``yunlu probe`` shows."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.render.terminal.page import ACCENT, indented, plain_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rich.console import Console, RenderableType

    from yunlu.jobs.machine_probe import LearntFactor, ProbeProgress, ProbeResult
    from yunlu.planning.machine_profile import KernelTiming, MachineProfile

_KINDS = {
    "product": "matrix products",
    "convolution": "convolutions",
    "convolution_back": "their gradients",
    "attention": "attention",
    "stream": "sums, copies",
    "function": "functions (gelu)",
    "random": "drawn numbers",
    "update": "Adam's update",
}
_COMPUTED = ("product", "convolution", "convolution_back", "attention")


@contextmanager
def probe_progress(console: Console) -> Generator[Callable[[ProbeProgress], None]]:
    """A bar that shows which part is measured; nothing where nothing is."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    bar = progress.add_task("starting", total=None)

    def show(measured: ProbeProgress) -> None:
        progress.start()
        total = measured.of or None
        progress.update(bar, description=measured.part, completed=measured.index, total=total)

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()


def probe_page(result: ProbeResult) -> RenderableType:
    """Figures of a machine."""
    probed = result.probed
    when = datetime.fromtimestamp(probed.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    quick = ", in a hurry (`yunlu probe` measures it all)" if probed.is_quick else ""
    title = Text.assemble(
        "\n ",
        (probed.name, f"bold {ACCENT}"),
        (f"  {probed.host} · torch {probed.torch} · {when}", "dim"),
        (f" · took {show_duration(probed.took_s)}{quick}", "dim"),
        "\n",
    )
    return Group(
        title, indented(_paces(probed)), "", *_facts(probed), _lesson(result.calibration), ""
    )


def _paces(probed: MachineProfile) -> RenderableType:
    table = plain_table()
    table.add_column("")
    for name in ("precision", "threads", "small", "medium", "large", "spread"):
        table.add_column(name, justify="right")
    for pace in probed.paces:
        threads = str(pace.threads) if probed.kind == "cpu" else "–"
        low, middle, high = (_rate(pace, i) for i in (0, len(pace.sizes) // 2, -1))
        spread = f"{pace.spread:.0%}"
        table.add_row(_KINDS[pace.kind], pace.precision, threads, low, middle, high, spread)
    return table


def _rate(pace: KernelTiming, index: int) -> str:
    rate = pace.sizes[index] / pace.seconds[index]
    return f"{show_count(rate)}FLOP/s" if pace.kind in _COMPUTED else f"{show_bytes(rate)}/s"


def _facts(probed: MachineProfile) -> Iterator[Text]:
    rows = {
        "memory": f"{show_bytes(probed.memory_bytes)}, {show_bytes(probed.memory_bytes_per_s)}/s",
        "operator": f"{show_duration(probed.call_s)} a call; in a model × {probed.mixed:.2f}, "
        f"convolutions × {probed.mixed_convolutions:.2f}",
    }
    if (link := probed.link) is not None:
        for name, time in (("all-reduce", link.all_reduce), ("send", link.send)):
            rows[name] = (
                f"{show_duration(time.message_s)} + bytes at {show_bytes(time.bytes_per_s)}/s, "
                f"two workers over {link.backend}"
            )
    if (disk := probed.disk) is not None:
        read, write = show_bytes(disk.read_bytes_per_s), show_bytes(disk.write_bytes_per_s)
        rows["disk"] = f"reads {read}/s, writes {write}/s"
    if (start := probed.start) is not None:
        rows["start"] = (
            f"torch after {show_duration(start.torch_s)}, a worker after "
            f"{show_duration(start.worker_s)} ({show_duration(start.cpu_s)} computing), "
            f"{show_bytes(start.resident_bytes)}"
        )
    for name, text in rows.items():
        yield Text.assemble((f" {name:<12}", "dim"), text)


def _lesson(learnt: LearntFactor) -> Text:
    if not learnt.runs:
        text = "no run yet: predictions come from these figures alone"
    else:
        runs = f"{learnt.runs} run" + ("s" if learnt.runs > 1 else "")
        text = f"{runs}: steps take × {learnt.factor:.2f} of what these figures say, "
        text += f"known to ± {learnt.sd_of_log:.0%}"
    return Text.assemble((f" {'learnt':<12}", "dim"), text)
