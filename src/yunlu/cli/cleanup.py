"""``yunlu rm``, ``prune``, ``du``: what takes space, and its removal; nothing goes without a yes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.client import default_client
from yunlu.core.errors import StoreError
from yunlu.render.terminal.page import make_console, print_value

if TYPE_CHECKING:
    from yunlu.client.protocol import Client
    from yunlu.jobs.cleanup import CleanupPlan


def rm(
    *runs: str,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"))] = False,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove runs with everything in them, after a question.

    A run that is alive, that another run started from, or that belongs to somebody else is refused.

    Args:
        runs: Their ids, unique prefixes of them, or: last.
        yes: Do not ask.
        dry_run: Only show what would go.
        json: Print one JSON object; with --yes or --dry-run.
    """
    if not runs:
        raise StoreError("no run is named", hint="yunlu rm RUN, with an id that yunlu ps shows")
    client = default_client()
    return _carry_out(client, client.plan_removal(runs), yes=yes, dry_run=dry_run, json=json)


def prune(
    *,
    older: str = "30d",
    keep_best: bool = False,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"))] = False,
    dry_run: bool = False,
    all: bool = False,
    json: bool = False,
) -> int:
    """Remove what is old and no longer needed: checkpoints, failed runs, caches; after a question.

    Models, runs that are alive or that another run started from, the best of a study, and what belongs
    to somebody else stay. What a killed process left half-removed goes, however new it is.

    Args:
        older: Age from which on something counts as old: 30d, 12h, 1d 12h.
        keep_best: Keep the best checkpoint of each run, also where its model is exported.
        yes: Do not ask.
        dry_run: Only show what would go.
        all: Show every item, not only the largest.
        json: Print one JSON object; with --yes or --dry-run.
    """
    client = default_client()
    plan = client.plan_prune(older=older, keep_best=keep_best)
    return _carry_out(client, plan, yes=yes, dry_run=dry_run, json=json, everything=all)


def du(*, all: bool = False, json: bool = False) -> int:
    """Show who takes the space: runs, checkpoints, studies, caches, data sets.

    Args:
        all: Show every run, not only the largest.
        json: Print one JSON object with every run.
    """
    usage = default_client().disk_usage()
    if json:
        print_value(usage, bytes=usage.size.bytes)
        return 0
    from yunlu.render.terminal.cleanup_page import space_page  # noqa: PLC0415 (slow to import)

    make_console().print(space_page(usage, now=time.time(), everything=all))
    return 0


def _carry_out(
    client: Client,
    plan: CleanupPlan,
    *,
    yes: bool,
    dry_run: bool,
    json: bool,
    everything: bool = False,
) -> int:
    if not (yes or dry_run) and (json or not sys.stdin.isatty()):
        where = "with --json nobody is asked" if json else "there is no terminal to ask at"
        raise StoreError(f"nothing was removed: {where}", hint="add --yes, or --dry-run to look")
    if json:
        answer = plan if dry_run else client.clean_up(plan)
        print_value(answer, bytes=answer.size.bytes, is_dry_run=dry_run)
        return 1 if getattr(answer, "skipped", ()) else 0
    from yunlu.render.terminal import cleanup_page as pages  # noqa: PLC0415 (slow to import)

    console = make_console()
    console.print(pages.plan_page(plan, now=time.time(), everything=everything))
    if dry_run or not plan.items:
        if plan.items:
            console.print(pages.dry_run_line(plan))
        return 0
    if not yes and not _is_agreed(pages.question(plan)):
        console.print(pages.unchanged_line())
        return 0
    result = client.clean_up(plan)
    console.print(pages.result_page(result))
    return 1 if result.skipped else 0


def _is_agreed(question: str) -> bool:
    sys.stdout.write(question)
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes", "是"}
