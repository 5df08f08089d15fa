"""``yunlu pause``: save and stop a queued run, and let others have its devices."""

from __future__ import annotations

from yunlu.jobs import service
from yunlu.render.terminal.page import make_console, state_text, to_json
from yunlu.scheduler import queue


def pause(run: str = "last", /, *, json: bool = False) -> int:
    """Save a checkpoint, give the devices back, and wait for `yunlu resume`.

    Args:
        run: Its id, a unique beginning of it, or: last.
        json: Print one JSON line.
    """
    store = service.find(run)
    queue.pause(store)
    console = make_console()
    with console.status(f"pausing {store.id}: saving a checkpoint"):
        record = service.stop(store)
    if json:
        print(to_json({"run": store.id, "state": record.state, "step": record.step}))
        return 0
    step = f" at step {record.step}" if record.step else ""
    again = f"yunlu resume {store.id} queues it again"
    words = f"is paused{step}; {again}"
    if not record.state.can_resume:
        words = f"has ended{step} before it could be paused"
    console.print(state_text(record.state), f" {store.id} {words}")
    return 0
