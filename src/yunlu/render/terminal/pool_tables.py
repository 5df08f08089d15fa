"""The pool as tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_count, show_duration
from yunlu.render.terminal.fitting_table import FittingTable
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import ACCENT, in_language, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from yunlu.scheduler.pool_view import Explanation, PoolNode, PoolRun, PoolView, RequestedNode
    from yunlu.scheduler.queue import QueueEntry

_PHASES = {
    "running": ("●", "bold green"),
    "starting": ("◔", "cyan"),
    "changing": ("↔", "cyan"),
    "leaving": ("◑", "yellow"),
    "waiting": ("○", "dim"),
    "backing off": ("↻", "yellow"),
    "paused": ("■", "yellow"),
    "stopped": ("■", "yellow"),
    "given up": ("✘", "bold red"),
    "troubled": ("!", "bold magenta"),
}
_FIRST_LEFT_OUT = ("cores", "pace", "team", "$", "prio", "progress", "deadline", "start")
"""Columns that a narrow screen leaves out, in this order."""
_OLD_S = 30.0
_MUCH = 0.2
"""Share of the cores that is worth a word."""
_MANY_MOST = 1 << 16


def pool_page(view: PoolView, *, now: float) -> RenderableType:
    """Nodes, then runs, then problems."""
    parts: list[RenderableType] = [_title(view)]
    if view.nodes:
        parts += [_nodes(view), *_others(view), Text("")]
    if view.pending_nodes:
        pending = Text(_pending_nodes(view.pending_nodes, now), style="cyan")
        parts += [Hanging(pending), Text("")]
    if view.runs:
        parts.append(_runs(view, now))
    else:
        parts.append(Text("nothing is queued: yunlu submit JOB", style="dim"))
    age_s = now - (view.at or now)
    if view.is_up and age_s > _OLD_S:
        text = f"the service last looked {show_duration(age_s)} ago: see .pool/service.log"
        parts.append(Hanging(Text(text, style="yellow")))
    for name, trouble in view.troubles.items():
        parts.append(Hanging(Text(f"{name}: {trouble}", style="yellow")))
    return Group(*parts)


def why_page(explanation: Explanation) -> RenderableType:
    """One run explained."""
    parts: list[RenderableType] = [
        Hanging(Text.assemble((explanation.run, "bold"), "  ", explanation.standing)),
        Text(""),
    ]
    if explanation.history:
        parts.append(_history(explanation))
        last = explanation.last
        if last is not None and last.figures:
            now = time.time()
            figures = "  ".join(
                f"{name.removesuffix('_at')} {_until(value, now)}"
                if name.endswith("_at")
                else f"{name} {_figure(value)}"
                for name, value in last.figures.items()
            )
            parts.append(Hanging(Text(f"by: {figures}", style="dim")))
    else:
        parts.append(Text("nothing has been decided on it yet", style="dim"))
    others = {run: count for run, count in explanation.holders.items() if run != explanation.run}
    if others:
        holders = ", ".join(f"{run} {count}" for run, count in others.items())
        parts.append(Hanging(Text(f"devices are held by: {holders}", style="dim")))
    return Group(*parts)


def _history(explanation: Explanation) -> FittingTable:
    table = FittingTable(
        lead=2, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False
    )
    for decision in explanation.history:
        when = time.strftime("%H:%M:%S", time.localtime(decision.at))
        before, devices = decision.was, decision.devices
        change = f"{before} → {devices}" if before != devices else f"{devices}"
        table.add_row(Text(when, style="dim"), change, Text(decision.text))
    return table


def terms_line(entry: QueueEntry, *, now: float) -> str:
    """Priority, devices, deadline and budget of a queued run."""
    request = entry.request
    most = f" to {request.most}" if request.most < _MANY_MOST else " or more"
    terms = [f"priority {entry.priority}", f"on {request.least}{'' if request.is_rigid else most}"]
    if entry.deadline_at is not None:
        left_s = entry.deadline_at - now
        span = show_duration(abs(left_s))
        terms.append(f"due {span} ago" if left_s < 0 else f"due in {span}")
    if entry.budget_dollars is not None:
        terms.append(f"for up to ${entry.budget_dollars:,.2f}")
    return ", ".join(terms)


def _title(view: PoolView) -> RenderableType:
    if not view.is_up:
        return Text("no pool is up: yunlu pool up starts one\n", style="yellow")
    facts = [
        f"{view.held} of {view.devices} devices held",
        f"policy {view.policy}",
        str(view.executor),
    ]
    if view.dollars_per_hour:
        facts.append(f"${view.dollars_per_hour:.2f}/h")
    title = in_language("pool", is_label=True)
    line = Text.assemble((f"{title}  ", f"bold {ACCENT}"), "  ·  ".join(facts))
    return Group(Hanging(line, hang=6), "")


def _nodes(view: PoolView) -> Table:
    table = plain_table(drop=("type", "$/h", "use"), dropped_note="see --json")
    for title in ("node", "type", "devices", "held by", "use", "$/h"):
        table.add_column(title, no_wrap=title != "held by", overflow="fold")
    holders: dict[str, list[str]] = {}
    for run in view.runs:
        for name, count in run.shares:
            holders.setdefault(name, []).append(f"{run.id} {count}")
    for node in view.nodes:
        bar = ProgressBar(
            total=max(node.devices, 1),
            completed=node.held,
            width=8,
            complete_style=ACCENT,
            finished_style=ACCENT,
        )
        cell = Table.grid(padding=(0, 1))
        cell.add_row(bar, f"{node.held}/{node.devices}")
        spot = " spot" if node.is_spot else ""
        price = f"{node.dollars_per_hour:.2f}" if node.dollars_per_hour else "–"
        who = ", ".join(holders.get(node.name, [])) or "–"
        name, type_ = Text(node.name, style="bold"), f"{node.type}{spot}"
        table.add_row(name, type_, cell, who, _busy(node), price)
    return table


def _others(view: PoolView) -> list[RenderableType]:
    """What other programs take of this machine: its cores are shared out as if they were free."""
    taken, cores = view.machine.get("other_cores"), view.machine.get("cores")
    if not taken or not cores or taken < _MUCH * cores:
        return []
    text = (
        f"other programs keep {taken:.1f} of {cores:g} cores busy: runs get less than their share"
    )
    return [Hanging(Text(text, style="yellow"))]


def _share_cores(view: PoolView, run: PoolRun) -> float | None:
    """Cores that a run's devices stand for, where they are shares of this machine's processors."""
    cores = view.machine.get("cores")
    is_shared = len(view.nodes) == 1 and view.nodes[0].type == "cpu"
    if not is_shared or not cores or not run.devices or "other_cores" not in view.machine:
        return None
    return cores * run.devices / max(view.devices, 1)


def _pending_nodes(nodes: Sequence[RequestedNode], now: float) -> str:
    """Number of nodes of each kind that were requested, and when the first is expected."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for node in nodes:
        kinds.setdefault((node.kind, node.devices), []).append(node.at)
    counts = [
        f"{len(at)} × {kind} of {devices}, {_until(min(at), now)}"
        for (kind, devices), at in kinds.items()
    ]
    return f"machines on their way: {'; '.join(counts)}"


def _busy(node: PoolNode) -> str:
    """Use of the GPUs, or of processors and memory."""
    if node.gpus:
        return "gpu " + " ".join(f"{busy:.0%}" for busy, _ in node.gpus)
    if node.cpu is None or node.memory is None:
        return "–"
    return f"cpu {node.cpu:.0%}, memory {node.memory:.0%}"


def _runs(view: PoolView, now: float) -> FittingTable:
    """The runs, in as many columns as fit."""
    runs = view.runs
    facts = {"deadline": "deadline_at", "$": "dollars", "team": "team"}
    absent = {title for title, key in facts.items() if not any(getattr(run, key) for run in runs)}
    rows = [_cells(run, now, _share_cores(view, run)) for run in runs]
    table = plain_table(drop=_FIRST_LEFT_OUT, dropped_note="see --json", lead=2)
    titles = [title for title in rows[0] if title not in absent]
    for title in titles:
        table.add_column(
            "" if title == "phase" else title,
            style="bold" if title == "run" else "",
            justify="left" if title in {"run", "phase", "team"} else "right",
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def _cores(run: PoolRun, share: float | None) -> Text:
    """Busy cores of its processes, and of how many; yellow where it does not get what it holds."""
    if run.cores is None or not run.devices:
        return Text("–")
    if share is None:
        return Text(f"{run.cores:.1f}")
    text = f"{run.cores:.1f} of {share:.2g}"
    return Text(text, style="yellow" if run.cores < (1 - _MUCH) * share else "")


def _cells(run: PoolRun, now: float, share: float | None) -> dict[str, str | Text]:
    sign, style = _PHASES.get(run.phase, ("·", "dim"))
    return {
        "run": run.id,
        "phase": Text(f"{sign} {run.phase}", style=style),
        "devices": _devices(run),
        "progress": "–" if run.progress is None else f"{run.progress:.0%}",
        "pace": f"{show_count(run.samples_per_s)}/s" if run.samples_per_s else "–",
        "cores": _cores(run, share),
        "start": _until(run.start_at, now) if not run.devices else "",
        "end": _until(run.end_at, now),
        "deadline": _deadline(run, now),
        "$": f"{run.dollars or 0:.2f}",
        "prio": str(run.priority),
        "team": run.team,
    }


def _deadline(run: PoolRun, now: float) -> Text:
    """Red where it has passed, or is predicted to be missed."""
    at = run.deadline_at
    if at is None:
        return Text("")
    if at <= now:
        return Text("passed", style="bold red")
    is_missed = run.end_at is not None and run.end_at > at
    return Text(_until(at, now), style="red" if is_missed else "")


def _devices(run: PoolRun) -> str:
    if run.devices is None:
        return ""
    least, most = run.least, run.most
    bounds = (
        f"{least}" if least == most else f"{least}–{most}" if most < _MANY_MOST else f"{least}+"
    )
    change = f"→{run.wanted}" if run.wanted not in {None, 0, run.devices} else ""
    return f"{run.devices}{change} of {bounds}"


def _until(at: float | None, now: float) -> str:
    if at is None:
        return "–"
    return "now" if at <= now + 1 else f"in {show_duration(at - now)}"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
