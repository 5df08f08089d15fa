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
    run_dir = service.find(run)
    queue.pause(run_dir)
    console = make_console()
    with console.status(f"pausing {run_dir.id}: saving a checkpoint"):
        record = service.stop(run_dir)
    if json:
        print(to_json({"run": run_dir.id, "state": record.state, "step": record.step}))
        return 0
    step = f" at step {record.step}" if record.step else ""
    again = f"yunlu resume {run_dir.id} queues it again"
    words = f"is paused{step}; {again}"
    if not record.state.can_resume:
        words = f"has ended{step} before it could be paused"
    console.print(state_text(record.state), f" {run_dir.id} {words}")
    return 0
