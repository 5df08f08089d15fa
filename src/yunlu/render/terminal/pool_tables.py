"""The pool as tables."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_count, show_duration
from yunlu.render.terminal.page import ACCENT, plain_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from yunlu.scheduler.explanation import Explanation
    from yunlu.scheduler.queue import Entry

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
"""Columns that a narrow screen goes without."""
_OLD_S = 30.0
_MANY_MOST = 1 << 16


def pool_page(view: Mapping[str, Any], *, now: float) -> RenderableType:
    """Machines, then runs, then what is wrong."""
    parts: list[RenderableType] = [_title(view)]
    if view.get("nodes"):
        parts += [_nodes(view), Text("")]
    if view.get("arrivals"):
        parts += [Text(_arrivals(view["arrivals"], now), style="cyan"), Text("")]
    if view.get("runs"):
        parts.append(_Runs(view, now))
    else:
        parts.append(Text("nothing is queued: yunlu submit JOB", style="dim"))
    age_s = now - float(view.get("at") or now)
    if view.get("is_up") and age_s > _OLD_S:
        words = f"the service last looked {show_duration(age_s)} ago: see .pool/service.log"
        parts.append(Text(words, style="yellow"))
    for what, words in (view.get("troubles") or {}).items():
        parts.append(Text(f"{what}: {words}", style="yellow"))
    return Group(*parts)


def why_page(found: Explanation) -> RenderableType:
    """One run explained."""
    parts: list[RenderableType] = [
        Text.assemble((found.run, "bold"), "  ", found.standing),
        Text(""),
    ]
    if found.history:
        table = Table.grid(padding=(0, 2, 0, 0))
        for told in found.history:
            when = time.strftime("%H:%M:%S", time.localtime(told.at))
            change = (
                f"{told.was} → {told.devices}" if told.was != told.devices else f"{told.devices}"
            )
            table.add_row(Text(when, style="dim"), change, Text(told.text))
        parts.append(table)
        last = found.last
        if last is not None and last.figures:
            now = time.time()
            figures = "  ".join(
                f"{name.removesuffix('_at')} {_until(value, now)}"
                if name.endswith("_at")
                else f"{name} {_figure(value)}"
                for name, value in last.figures.items()
            )
            parts.append(Text(f"by: {figures}", style="dim"))
    else:
        parts.append(Text("nothing has been decided on it yet", style="dim"))
    others = {run: count for run, count in found.holders.items() if run != found.run}
    if others:
        who = ", ".join(f"{run} {count}" for run, count in others.items())
        parts.append(Text(f"devices are held by: {who}", style="dim"))
    return Group(*parts)


def terms_line(entry: Entry, *, now: float) -> str:
    """What was asked for a run, in words."""
    needs = entry.needs
    most = f" to {needs.most}" if needs.most < _MANY_MOST else " or more"
    words = [f"priority {entry.priority}", f"on {needs.least}{'' if needs.is_rigid else most}"]
    if entry.deadline_at is not None:
        left_s = entry.deadline_at - now
        late = (
            f"due {show_duration(-left_s)} ago" if left_s < 0 else f"due in {show_duration(left_s)}"
        )
        words.append(late)
    if entry.budget_dollars is not None:
        words.append(f"for up to ${entry.budget_dollars:,.2f}")
    return ", ".join(words)


def _title(view: Mapping[str, Any]) -> Text:
    if not view.get("is_up"):
        return Text("no pool is up: yunlu pool up starts one\n", style="yellow")
    facts = [
        f"{view.get('held', 0)} of {view.get('devices', 0)} devices held",
        f"policy {view.get('policy')}",
        str(view.get("executor")),
    ]
    if dollars := view.get("dollars_per_hour"):
        facts.append(f"${dollars:.2f}/h")
    return Text.assemble(("pool  ", f"bold {ACCENT}"), "  ·  ".join(facts), "\n")


def _nodes(view: Mapping[str, Any]) -> Table:
    table = plain_table()
    for title in ("node", "type", "devices", "held by", "use", "$/h"):
        table.add_column(title, no_wrap=title != "held by", overflow="fold")
    holders: dict[str, list[str]] = {}
    for run in view.get("runs") or ():
        for name, count in run.get("shares") or ():
            holders.setdefault(name, []).append(f"{run['id']} {count}")
    for node in view["nodes"]:
        bar = ProgressBar(
            total=max(node["devices"], 1),
            completed=node["held"],
            width=8,
            complete_style=ACCENT,
            finished_style=ACCENT,
        )
        cell = Table.grid(padding=(0, 1))
        cell.add_row(bar, f"{node['held']}/{node['devices']}")
        spot = " spot" if node.get("is_spot") else ""
        price = f"{node['dollars_per_hour']:.2f}" if node.get("dollars_per_hour") else "–"
        who = ", ".join(holders.get(node["name"], [])) or "–"
        name, type_ = Text(node["name"], style="bold"), f"{node['type']}{spot}"
        table.add_row(name, type_, cell, who, _busy(node), price)
    return table


def _arrivals(arrivals: Sequence[Mapping[str, Any]], now: float) -> str:
    """How many machines of which kind are on their way, and when the first will be there."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for each in arrivals:
        kinds.setdefault((each["kind"], each["devices"]), []).append(each["at"])
    words = [
        f"{len(at)} × {kind} of {devices}, {_until(min(at), now)}"
        for (kind, devices), at in kinds.items()
    ]
    return f"machines on their way: {'; '.join(words)}"


def _busy(node: Mapping[str, Any]) -> str:
    """How busy its devices are, and how full its memory: of GPUs each."""
    if gpus := node.get("gpus"):
        return "gpu " + " ".join(f"{busy:.0%}" for busy, _ in gpus)
    if node.get("cpu") is None:
        return "–"
    return f"cpu {node['cpu']:.0%}, memory {node['memory']:.0%}"


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs, in as many columns as there is room for."""

    view: Mapping[str, Any]
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        runs: list[Mapping[str, Any]] = self.view["runs"]
        facts = {"deadline": "deadline_at", "$": "dollars", "team": "team"}
        absent = {title for title, key in facts.items() if not any(run.get(key) for run in runs)}
        cells = [_cells(run, self.now) for run in runs]
        titles = [title for title in cells[0] if title not in absent]
        left_out: list[str] = []
        endless = options.update(max_width=10_000)
        table = _table_of(titles, cells)
        for title in _FIRST_LEFT_OUT:
            if console.measure(table, options=endless).maximum <= options.max_width:
                break
            if title in titles:
                titles.remove(title)
                left_out.append(title)
                table = _table_of(titles, cells)
        yield table
        if left_out:
            words = f"no room for: {', '.join(left_out)}; see --json"
            yield Text(words, style="dim")


def _table_of(titles: Sequence[str], rows: Sequence[Mapping[str, str | Text]]) -> Table:
    table = plain_table()
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


def _cells(run: Mapping[str, Any], now: float) -> dict[str, str | Text]:
    sign, style = _PHASES.get(run["phase"], ("·", "dim"))
    cores = run.get("cores")
    return {
        "run": run["id"],
        "phase": Text(f"{sign} {run['phase']}", style=style),
        "devices": _devices(run),
        "progress": "–" if run.get("progress") is None else f"{run['progress']:.0%}",
        "pace": _pace(run),
        "cores": "–" if cores is None or not run.get("devices") else f"{cores:.1f}",
        "start": _until(run.get("start_at"), now) if not run.get("devices") else "",
        "end": _until(run.get("end_at"), now),
        "deadline": _deadline(run, now),
        "$": f"{run.get('dollars') or 0:.2f}",
        "prio": str(run.get("priority", "")),
        "team": run.get("team") or "",
    }


def _deadline(run: Mapping[str, Any], now: float) -> Text:
    """Red where it is passed, or will be before the run is over."""
    at, end_at = run.get("deadline_at"), run.get("end_at")
    if at is None:
        return Text("")
    if at <= now:
        return Text("passed", style="bold red")
    return Text(_until(at, now), style="red" if end_at is not None and end_at > at else "")


def _devices(run: Mapping[str, Any]) -> str:
    if "devices" not in run:
        return ""
    least, most = run.get("least", 1), run.get("most", 1)
    bounds = (
        f"{least}" if least == most else f"{least}–{most}" if most < _MANY_MOST else f"{least}+"
    )
    change = f"→{run['wanted']}" if run.get("wanted") not in {None, 0, run["devices"]} else ""
    return f"{run['devices']}{change} of {bounds}"


def _pace(run: Mapping[str, Any]) -> str:
    pace = run.get("samples_per_s")
    return f"{show_count(pace)}/s" if pace else "–"


def _until(at: float | None, now: float) -> str:
    if at is None:
        return "–"
    return "now" if at <= now + 1 else f"in {show_duration(at - now)}"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
