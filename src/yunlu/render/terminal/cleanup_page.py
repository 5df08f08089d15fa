"""What ``yunlu rm``, ``prune`` and ``du`` show: what would go and why, and who takes the space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from yunlu.core.units import show_bytes
from yunlu.render.i18n import say
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import in_language, indented, plain_table, state_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Table

    from yunlu.core.disk_usage import DiskSize
    from yunlu.jobs.cleanup import CleanupPlan, CleanupResult, RemovableItem
    from yunlu.jobs.space import DiskUsage, SpaceShare

_DAY_S = 86_400.0
_FEW = 20


def plan_page(plan: CleanupPlan, *, now: float, everything: bool = False) -> RenderableType:
    """What would go, the largest first; what stays although it is old, and why."""
    parts: list[RenderableType] = []
    items = sorted(plan.items, key=lambda item: -item.size.bytes)
    shown = items if everything else items[:_FEW]
    if items:
        parts.append(indented(_item_table(shown, now=now)))
    if more := items[len(shown) :]:
        parts.append(_dim(say("cleanup.more", count=len(more), size=_total(more))))
    stays = plan.retained if everything else plan.retained[:_FEW]
    parts += [
        Text(
            f" {old_run.run} {say(f'cleanup.keep.{old_run.reason}', by=in_language(old_run.by))}",
            style="dim",
        )
        for old_run in stays
    ]
    if others := len(plan.retained) - len(stays):
        parts.append(_dim(f"+ {others}"))
    parts += [
        Text(f" {say('cleanup.last_model', name=name)}", style="yellow")
        for name in plan.last_models
    ]
    if not items:
        parts.append(Text(f" {say('cleanup.nothing', home=plan.home)}"))
    return Group(*parts)


def dry_run_line(plan: CleanupPlan) -> Text:
    """The sum of a plan that is only shown."""
    sizes = {"count": len(plan.items), "size": show_bytes(plan.size.bytes)}
    return Text(f" {say('cleanup.dry_run', **sizes)}")


def question(plan: CleanupPlan) -> str:
    """What is asked before anything goes."""
    sizes = {"count": len(plan.items), "size": show_bytes(plan.size.bytes)}
    return f" {say('cleanup.question', **sizes)} [y/N] "


def result_page(result: CleanupResult) -> RenderableType:
    """What went, and what stayed after all."""
    sizes = {"count": len(result.removed), "size": show_bytes(result.size.bytes)}
    lines: list[RenderableType] = [Text(f" {say('cleanup.removed', **sizes)}")]
    lines += [
        Hanging(
            Text(f" {say('cleanup.skipped', path=path, problem=in_language(problem))}", "yellow")
        )
        for path, problem in ((item.path, item.problem) for item in result.skipped)
    ]
    return Group(*lines)


def unchanged_line() -> Text:
    """Nothing happened."""
    return Text(f" {say('cleanup.unchanged')}")


def _item_table(items: Iterable[RemovableItem], *, now: float) -> Table:
    table = plain_table()
    table.add_column(say("cleanup.what"), overflow="fold")
    table.add_column(say("cleanup.name"), overflow="fold")
    table.add_column(say("cleanup.size"), justify="right", no_wrap=True)
    table.add_column(say("cleanup.idle"), justify="right", no_wrap=True)
    table.add_column(say("cleanup.why"), overflow="fold")
    for item in items:
        table.add_row(
            say(f"cleanup.kind.{item.kind}"),
            _name(item),
            show_bytes(item.size.bytes),
            _days(now - item.used_at) if item.used_at else "–",
            say(f"cleanup.reason.{item.reason}"),
        )
    return table


def _name(item: RemovableItem) -> str:
    path = Path(item.path)
    if item.kind == "run":
        return item.run
    step = path.name.removeprefix("step-")
    if item.kind == "checkpoint" and step.isdecimal():
        return f"{item.run} {say('cleanup.step', step=int(step))}"
    if item.run:
        return f"{item.run}/{path.name}"
    return path.name if item.kind == "leftover" else f"{path.parent.name}/{path.name}"


def _days(seconds: float) -> str:
    return say("cleanup.days", days=max(0, int(seconds // _DAY_S)))


def _total(items: Iterable[RemovableItem]) -> str:
    return show_bytes(sum(item.size.bytes for item in items))


def space_page(usage: DiskUsage, *, now: float, everything: bool = False) -> RenderableType:
    """The kinds of things that take the space, then the runs, the largest first."""
    parts: list[RenderableType] = ["", indented(_share_table(usage)), ""]
    runs = usage.runs if everything else usage.runs[:_FEW]
    if runs:
        table = plain_table()
        table.add_column(say("space.run"), overflow="fold")
        table.add_column(say("space.state"), no_wrap=True)
        table.add_column(say("space.all"), justify="right", no_wrap=True)
        table.add_column(say("space.checkpoints"), justify="right", no_wrap=True)
        table.add_column(say("space.model"), justify="right", no_wrap=True)
        table.add_column(say("cleanup.idle"), justify="right", no_wrap=True)
        for run in runs:
            table.add_row(
                run.id,
                state_text(run.state) if run.state else "–",
                show_bytes(run.size.bytes),
                show_bytes(run.checkpoints.bytes) if run.checkpoints.bytes else "–",
                show_bytes(run.model.bytes) if run.model.bytes else "–",
                _days(now - run.updated_at) if run.updated_at else "–",
            )
        parts.append(indented(table))
    else:
        parts.append(Text(f" {say('space.no_runs', home=usage.home)}"))
    if rest := len(usage.runs) - len(runs):
        parts.append(_dim(say("space.older", count=rest)))
    parts += ["", _dim(say("space.hint"))]
    return Group(*parts)


def _share_table(usage: DiskUsage) -> Table:
    table = plain_table()
    table.add_column(say("cleanup.what"), overflow="fold")
    table.add_column(say("cleanup.size"), justify="right", no_wrap=True)
    table.add_column(say("space.files"), justify="right", no_wrap=True)
    table.add_column(say("space.where"), overflow="fold")
    ours = [share for share in usage.shares if share.kind not in {"hub", "own-data"}]
    others = [share for share in usage.shares if share.kind in {"hub", "own-data"}]
    for share in ours:
        _add_share(table, share)
    table.add_row(
        Text(say("space.total"), style="bold"), Text(_size(usage.size), style="bold"),
        f"{usage.size.files:,}",
    )  # fmt: skip
    if others:
        table.add_section()
        table.add_row(Text(say("space.not_ours"), style="dim"))
    for share in others:
        _add_share(table, share)
    return table


def _add_share(table: Table, share: SpaceShare) -> None:
    kind = say(f"space.kind.{share.kind}")
    table.add_row(kind, _size(share.size), f"{share.size.files:,}", share.path)


def _size(size: DiskSize) -> str:
    return ("≥ " if size.is_partial else "") + show_bytes(size.bytes)


def _dim(text: str) -> Text:
    return Text(f" {text}", style="dim")
