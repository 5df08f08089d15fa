"""``yunlu stop``: save and stop a run, or end it at once."""

from __future__ import annotations

from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_json, state_text


def stop(run: str = "last", /, *, now: bool = False, json: bool = False) -> int:
    """Ask a run to save a checkpoint and stop, and wait until it is no longer active.

    Args:
        run: Its id, a unique prefix of it, or: last.
        now: End it at once, without saving.
        json: Print one JSON line.
    """
    client, console = default_client(), make_console()
    if json:
        stopped = client.stop(run, now=now)
        print_json({"run": stopped.id, "state": stopped.state, "step": stopped.step})
        return 0
    before = client.run(run)
    if not before.state.is_active:
        client.stop(before.id)  # the pool would start it again
        console.print(state_text(before.state), f" {before.id} has ended: nothing to stop")
        return 0
    doing = "ending it" if now else "saving a checkpoint"
    with console.status(Text(f"stopping {before.id}: {doing}")):
        stopped = client.stop(before.id, now=now)
    again = f"; yunlu resume {stopped.id} continues it" if stopped.state.can_resume else ""
    step = f" at step {stopped.step}" if stopped.step else ""
    console.print(state_text(stopped.state), f" {stopped.id}{step}{again}")
    return 0
