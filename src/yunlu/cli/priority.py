"""``yunlu priority``: let a queued run go before others, or after them."""

from __future__ import annotations

from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_json


def priority(run: str, number: int, /, *, json: bool = False) -> int:
    """Change the priority of a queued run; the pool applies it at its next decision.

    Args:
        run: Its id, a unique prefix of it, or: last.
        number: Higher goes first; 0 is usual.
        json: Print one JSON line.
    """
    client = default_client()
    run_id = client.run(run).id
    entry = client.pool_change(run_id, priority=number)
    if json:
        print_json({"run": run_id, "priority": entry.priority})
        return 0
    make_console().print(Text.assemble((run_id, "bold"), f": priority {entry.priority}"))
    return 0
