"""``yunlu stop``: save and stop a run, or end it at once."""

from __future__ import annotations

from yunlu.jobs import service
from yunlu.render.terminal.page import make_console, state_text, to_json
from yunlu.scheduler.queue import withdraw


def stop(run: str = "last", /, *, now: bool = False, json: bool = False) -> int:
    """Ask a run to save a checkpoint and stop, and wait until it rests.

    Args:
        run: Its id, a unique beginning of it, or: last.
        now: Do not save: end it at once.
        json: Print one JSON line.
    """
    console = make_console()
    store = service.find(run)
    withdraw(store)  # else the pool would go on with it
    if json:
        record = service.stop(store, now=now)
        print(to_json({"run": store.id, "state": record.state, "step": record.step}))
        return 0
    before = service.read_record(store)
    if not before.state.is_active:
        console.print(state_text(before.state), f" {store.id} rests already: nothing to stop")
        return 0
    said = "ending it" if now else "saving a checkpoint"
    with console.status(f"stopping {store.id}: {said}"):
        record = service.stop(store, now=now)
    again = f"; yunlu resume {record.id} goes on" if record.state.can_resume else ""
    step = f" at step {record.step}" if record.step else ""
    console.print(state_text(record.state), f" {record.id}{step}{again}")
    return 0
