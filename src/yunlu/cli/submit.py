"""``yunlu submit``: queue a job for the pool, and return."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_json, title_text

Number = Annotated[int | None, Parameter(show_default=False)]


def submit(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    plan: Annotated[str | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    priority: int = 0,
    team: str = "",
    min_devices: Number = None,
    max_devices: Number = None,
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Queue a job. The pool starts it in its turn, and gives it devices as they become free.

    A job that names its devices or its whole layout keeps that size, unless bounds are given here.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        plan: Train so as `yunlu plan JOB --json > FILE` planned it: FILE, or FILE:2 for its second option.
        name: Name of the run.
        priority: Higher goes first.
        team: Team whose quota it uses.
        min_devices: Fewest devices it starts on.
        max_devices: Most devices it is given.
        deadline: When it should be finished: 90min, 36h, 1d 12h from now.
        budget: Most it may cost, in dollars; it is paused when that is spent.
        json: Print one JSON line.
    """
    from yunlu.spec.load import load_job, source_of  # noqa: PLC0415 (slow to import)

    options = [f"name={name}"] if name else []
    client = default_client()
    queued = client.submit(
        load_job(job, overrides=(*overrides, *options)),
        source=source_of(job),
        plan=None if plan is None else client.load_plan(plan),
        priority=priority,
        team=team,
        min_devices=min_devices,
        max_devices=max_devices,
        deadline=deadline,
        budget=budget,
    )
    if json:
        print_json({"run": queued.run, "dir": queued.dir, "pool_is_up": queued.pool_is_up})
        return 0
    console = make_console()
    size = f"{queued.least}" if queued.is_rigid else f"{queued.least} or more"
    console.print(title_text(queued.run, f"queued, on {size}"))
    if not queued.pool_is_up:
        console.print(" no pool is up yet: yunlu pool up starts it", style="yellow")
    else:
        console.print(f" yunlu pool shows the queue; yunlu pool why {queued.run} explains")
    if near := queued.similar_team:
        text = f" team {team!r} has no quota; did you mean {near!r}? yunlu stop takes it back"
        console.print(text, style="yellow")
    return 0
