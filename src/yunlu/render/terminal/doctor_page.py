"""What ``yunlu doctor`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.hardware.machine import Device, PrecisionSpeed
    from yunlu.jobs.doctor import MachineFindings, OptionalPart, StoreState


def doctor_page(findings: MachineFindings) -> RenderableType:
    """The findings for people: from what is here to what is missing."""
    sections = [_title(findings), *_section("Machine", _machine(findings))]
    if findings.machine is not None:
        sections += _section("Devices", _devices(findings.machine.devices))
    if (measured := findings.measured) is not None:
        title = f"Precisions on {measured.device}, speed beside fp32"
        sections += _section(title, _precisions(measured.precisions))
    sections += _section("Optional parts", _parts(findings.parts))
    return Group(*sections, _ending(findings), "")


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
        return Text.assemble(
            ("\n✓ This machine can train.", "bold green"),
            ("  Begin with `yunlu init`, or `yunlu train JOB.yaml`.", "dim"),
        )
    text = Text("\n✗ This machine cannot train yet.", style="bold red")
    for advice in findings.advice:
        text.append(f"\n  → {advice}", style="not bold yellow")
    return text


def _mark(good: bool, *, absent: str = "✗") -> Text:
    return Text("✓", style="green") if good else Text(absent, style="yellow")


def _table(columns: int = 0) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for position in range(columns):
        table.add_column(no_wrap=position < columns - 1, overflow="fold")
    return table
