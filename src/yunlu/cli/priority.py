"""``yunlu priority``: let a queued run go before others, or after them."""

from __future__ import annotations

from yunlu.jobs import service
from yunlu.render.terminal.page import make_console, to_json
from yunlu.scheduler.queue import set_priority


def priority(run: str, number: int, /, *, json: bool = False) -> int:
    """Change the priority of a queued run; the pool follows at its next look.

    Args:
        run: Its id, a unique beginning of it, or: last.
        number: Higher goes first; 0 is usual.
        json: Print one JSON line.
    """
    store = service.find(run)
    entry = set_priority(store, number)
    if json:
        print(to_json({"run": store.id, "priority": entry.priority}))
        return 0
    make_console().print(f"[bold]{store.id}[/]: priority {entry.priority}")
    return 0
