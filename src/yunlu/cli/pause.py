"""``yunlu pause``: save and stop a queued run, and release its devices."""

from __future__ import annotations

from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_json, state_text


def pause(run: str = "last", /, *, json: bool = False) -> int:
    """Save a checkpoint, release the devices, and wait for `yunlu resume`.

    Args:
        run: Its id, a unique prefix of it, or: last.
        json: Print one JSON line.
    """
    client, console = default_client(), make_console()
    run_id = client.run(run).id
    with console.status(Text(f"pausing {run_id}: saving a checkpoint")):
        paused = client.pause(run_id)
    if json:
        print_json({"run": paused.id, "state": paused.state, "step": paused.step})
        return 0
    step = f" at step {paused.step}" if paused.step else ""
    result = f"is paused{step}; yunlu resume {paused.id} queues it again"
    if not paused.state.can_resume:
        result = f"has ended{step} before it could be paused"
    console.print(state_text(paused.state), f" {paused.id} {result}")
    return 0
