"""``yunlu resize``: another number of workers for a run that is training."""

from __future__ import annotations

from yunlu.jobs import service
from yunlu.jobs.resize import resize as ask_to_resize
from yunlu.render.terminal.page import make_console


def resize(run: str = "last", /, *, devices: int) -> int:
    """Go on with more or fewer workers from the next step on; no step and no sample is lost.

    Args:
        run: Its id, a unique beginning of it, or: last.
        devices: How many workers.
    """
    store = service.find(run)
    resized = ask_to_resize(store, devices=devices)
    console = make_console()
    console.print(f"[bold]{store.id}[/]: {resized.text}, as [bold]{resized.layout}[/]")
    return 0
