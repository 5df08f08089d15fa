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
    from yunlu.runs.run_dir import RunDir


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
    run_dir = service.find(run)
    place = find_launch(waits=not detach)
    if place is not None:
        return watch_launched(run_dir, place, json=json)
    if is_queued_again(run_dir):
        return _tell_queued(run_dir, json=json)
    since = end_of(run_dir)
    service.resume(run_dir)
    if not json:
        make_console().print(f"\n resuming    [bold]{run_dir.id}[/]")
    if detach:
        return leave(run_dir, json=json)
    return watch(run_dir, json=json, since=since)


def _tell_queued(run_dir: RunDir, *, json: bool) -> int:
    if json:
        print(to_json({"run": run_dir.id, "dir": str(run_dir.path), "queued": True}))
    else:
        words = f"\n queued again  [bold]{run_dir.id}[/]; yunlu pool shows when it goes on"
        make_console().print(words)
    return 0
