"""What ``yunlu doctor`` and ``yunlu probe`` show of this machine."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import ACCENT, in_language, indented, padded_label, plain_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

    from yunlu.hardware.fleet import Device, PrecisionSpeed
    from yunlu.jobs.calibration import LearntFactor, ProbeProgress, ProbeResult
    from yunlu.jobs.doctor import MachineFindings, OptionalPart, StoreState
    from yunlu.planning.machine_profile import KernelTiming, MachineProfile


def doctor_page(findings: MachineFindings) -> RenderableType:
    """The findings for people: from what is here to what is missing."""
    sections = [_title(findings), *_section("Machine", _machine(findings))]
    if findings.machine is not None:
        sections += _section("Devices", _devices(findings.machine.devices))
    if findings.accelerators.drivers:
        sections += _section("Accelerators", _accelerators(findings))
    if (measured := findings.measured) is not None:
        title = f"Precisions on {measured.device}, speed beside fp32"
        sections += _section(title, _precisions(measured.precisions))
    sections += _section("Optional parts", _parts(findings.parts))
    return Group(*sections, Hanging(_ending(findings), hang=2), "")


def _title(findings: MachineFindings) -> Text:
    versions = [f"Python {findings.python}"]
    if findings.torch.version:
        versions.append(f"torch {findings.torch.version}")
    return Text.assemble(
        "\n",
        ("云炉 Yunlu ", "bold"),
        (findings.yunlu, "bold"),
        "  ",
        (" · ".join(versions), "dim"),
    )


def _section(title: str, table: Table) -> list[RenderableType]:
    title = in_language(title, is_label=True)
    return [Text(f"\n{title}", style="bold cyan"), Padding(table, (0, 0, 0, 2))]


def _machine(findings: MachineFindings) -> Table:
    table, machine, store = _table(), findings.machine, findings.store
    if machine is not None:
        free = max(device.memory_bytes for device in machine.devices if device.kind == "cpu")
        price = machine.dollars_per_hour
        table.add_row("host", machine.hostname)
        table.add_row("cores", str(machine.cores))
        table.add_row("memory", f"{show_bytes(machine.memory_bytes)}, {show_bytes(free)} free")
        table.add_row("price", f"{price} USD/h" if price is not None else _NO_PRICE)
    table.add_row("runs", Text(store.path, overflow="fold"))
    table.add_row("disk", Text(f"{show_bytes(store.free_bytes)} free, ") + _writable(store))
    return table


_NO_PRICE = "not set; YUNLU_DOLLARS_PER_HOUR puts a cost in every plan"


def _writable(store: StoreState) -> Text:
    if store.problem:
        return Text(f"not writable: {store.problem}", style="red")
    return Text("writable")


def _devices(devices: Sequence[Device]) -> Table:
    table = _table()
    for device in devices:
        fast = ", ".join(device.fast_precisions)
        memory = f"{show_bytes(device.memory_bytes)} free"
        table.add_row(device.kind, Text(device.name), memory, f"computes in {fast}")
    return table


def _accelerators(findings: MachineFindings) -> Table:
    table, facts = _table(columns=3), findings.accelerators
    for driver in facts.drivers:
        problems = [item for item in findings.accelerator_problems if item.title == driver.title]
        parts = [f"{driver.devices} by its driver {driver.version or ''}".rstrip()]
        if driver.maker == "ascend":
            parts.append(f"CANN {facts.ascend.cann or 'not found'}")
            parts.append(f"torch_npu {facts.ascend.torch_npu or 'not installed'}")
        if not problems:
            parts.append(f"torch can use {facts.seen}" if facts.seen else "not used")
        text = Text(" · ".join(parts))
        for item in problems:
            text.append(f"\n{item.problem}")
            text.append(f"\n→ {item.advice}", style="yellow")
        table.add_row(_mark(not problems), driver.title, text)
    return table


def _precisions(speeds: Sequence[PrecisionSpeed]) -> Table:
    table = _table(columns=5)
    fastest = max(speed.relative_speed for speed in speeds)
    for speed in speeds:
        good = speed.is_worth_using
        bar = Bar(fastest, 0, speed.relative_speed, width=16, color="green" if good else "red")
        times = f"{speed.relative_speed:.2f}×"
        table.add_row(_mark(good), speed.precision, bar, times, speed.verdict)
    return table


def _parts(parts: Sequence[OptionalPart]) -> Table:
    table = _table(columns=4)
    for part in parts:
        here = part.version is not None
        purpose = Text(part.purpose)
        if not here:
            purpose.append(f"\n→ {part.install}", style="yellow")
        table.add_row(_mark(here, absent="–"), part.name, part.version or "", purpose)
    return table


def _ending(findings: MachineFindings) -> Text:
    if findings.can_train:
        only = (
            ", on its CPU only"
            if findings.accelerator_problems and not _has_accelerator(findings)
            else ""
        )
        return Text.assemble(
            (f"\n✓ This machine can train{only}.", "bold green"),
            ("  Begin with `yunlu init`, or `yunlu train JOB.yaml`.", "dim"),
        )
    text = Text("\n✗ This machine cannot train yet.", style="bold red")
    for advice in findings.advice:
        text.append(f"\n  → {advice}", style="not bold yellow")
    return text


def _has_accelerator(findings: MachineFindings) -> bool:
    return findings.accelerators.seen > 0


def _mark(good: bool, *, absent: str = "✗") -> Text:
    return Text("✓", style="green") if good else Text(absent, style="yellow")


def _table(columns: int = 0) -> FittingTable:
    table = FittingTable(
        lead=2, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False
    )
    for position in range(columns):
        table.add_column(no_wrap=position < columns - 1, overflow="fold")
    return table


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
        " ",
        (probed.name, f"bold {ACCENT}"),
        (f"  {probed.host} · torch {probed.torch} · {when}", "dim"),
        (f" · took {show_duration(probed.took_s)}{quick}", "dim"),
    )
    return Group(
        "",
        Hanging(title, hang=3),
        "",
        indented(_paces(probed)),
        "",
        *_facts(probed),
        _lesson(result.calibration),
        "",
    )


def _paces(probed: MachineProfile) -> RenderableType:
    table = plain_table(drop=("medium", "spread"), dropped_note="see --json", lead=2)
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


def _facts(probed: MachineProfile) -> Iterator[Hanging]:
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
        yield Hanging(Text.assemble((f" {padded_label(name, 12)}", "dim"), text), hang=13)


def _lesson(learnt: LearntFactor) -> Hanging:
    if not learnt.runs:
        text = "no run yet: predictions come from these figures alone"
    else:
        runs = f"{learnt.runs} run" + ("s" if learnt.runs > 1 else "")
        text = f"{runs}: steps take × {learnt.factor:.2f} of what these figures say, "
        text += f"known to ± {learnt.sd_of_log:.0%}"
    return Hanging(Text.assemble((f" {padded_label('learnt', 12)}", "dim"), text), hang=13)
