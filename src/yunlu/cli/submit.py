"""``yunlu submit``: queue a job for the pool, and return."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter

from yunlu.client.api import source_of, validate
from yunlu.core.errors import StoreError, nearest
from yunlu.jobs import service
from yunlu.render.terminal.page import ACCENT, make_console, to_json
from yunlu.scheduler.control import find_service
from yunlu.scheduler.pool_store import PoolStore
from yunlu.scheduler.queue import enqueue, read_options, read_entry

Number = Annotated[int | None, Parameter(show_default=False)]


def submit(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    priority: int = 0,
    team: str = "",
    min_devices: Number = None,
    max_devices: Number = None,
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Queue a job. The pool starts it when it is its turn, and gives it devices as they are free.

    A job that names its devices or its whole layout keeps that size, unless bounds are given here.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        name: Name the run.
        priority: Higher goes first.
        team: Whose devices it uses.
        min_devices: It does not start on fewer.
        max_devices: It is never given more.
        deadline: When it should be done: 90min, 36h, 1d 12h from now.
        budget: What it may cost, in dollars; it is paused when that is spent.
        json: Print one JSON line.
    """
    said = [f"name={name}"] if name else []
    asked = validate(job, overrides=(*overrides, *said))
    wanted = read_options(
        priority=priority,
        team=team,
        min_devices=min_devices,
        max_devices=max_devices,
        deadline=deadline,
        budget_dollars=budget,
    )
    run = enqueue(asked, wanted, source=source_of(job))
    is_up = find_service(service.home()) is not None
    if json:
        print(to_json({"run": run.id, "dir": run.address, "pool_is_up": is_up}))
        return 0
    console = make_console()
    entry = read_entry(run)
    assert entry is not None
    needs = entry.needs
    size = f"{needs.least}" if needs.is_rigid else f"{needs.least} or more"
    console.print(f"\n [bold {ACCENT}]云炉[/]  [bold]{run.id}[/]  [dim]queued, on {size}[/]")
    if not is_up:
        console.print(" no pool is up yet: yunlu pool up starts it", style="yellow")
    else:
        console.print(f" yunlu pool shows the queue; yunlu pool why {run.id} explains")
    if near := _find_near_team(team):
        words = f" team {team!r} has no quota; did you mean {near!r}? yunlu stop takes it back"
        console.print(words, style="yellow")
    return 0


def _find_near_team(team: str) -> str | None:
    """A team of the pool that was probably meant; none where the team is known, or like no other."""
    with suppress(StoreError):  # of another version
        known = PoolStore(service.home()).read_settings()
        if team and known is not None and team not in known.quotas:
            return nearest(team, known.quotas)
    return None
