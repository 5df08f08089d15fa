"""``yunlu resume``: another life for a run that was stopped, failed or was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.cli.train import leave, watch, watch_launched
from yunlu.jobs import service
from yunlu.jobs.follow import end_of
from yunlu.jobs.launch import find_launch
from yunlu.render.terminal.page import make_console, to_json
from yunlu.scheduler.control import is_queued_again

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore


def resume(
    run: str = "last",
    /,
    *,
    detach: bool = False,
    json: bool = False,
) -> int:
    """Go on with a stopped, failed or lost run from its newest good checkpoint.

    Args:
        run: Its id, a unique beginning of it, or: last.
        detach: Return at once; the run goes on.
        json: Write every event and metric record as one JSON line, and nothing else.
    """
    store = service.find(run)
    place = find_launch(waits=not detach)
    if place is not None:
        return watch_launched(store, place, json=json)
    if is_queued_again(store):
        return _tell_queued(store, json=json)
    since = end_of(store)
    service.resume(store)
    if not json:
        make_console().print(f"\n resuming    [bold]{store.id}[/]")
    if detach:
        return leave(store, json=json)
    return watch(store, json=json, since=since)


def _tell_queued(run: RunStore, *, json: bool) -> int:
    if json:
        print(to_json({"run": run.id, "dir": run.address, "queued": True}))
    else:
        words = f"\n queued again  [bold]{run.id}[/]; yunlu pool shows when it goes on"
        make_console().print(words)
    return 0
