"""``yunlu resize``: another number of workers for a run that is training."""

from __future__ import annotations

from rich.text import Text

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console


def resize(run: str = "last", /, *, devices: int) -> int:
    """Continue with more or fewer workers from the next step on; no step and no sample is lost.

    Args:
        run: Its id, a unique prefix of it, or: last.
        devices: Number of workers.
    """
    client = default_client()
    run_id = client.run(run).id
    resized = client.resize(run_id, devices=devices)
    line = Text.assemble((run_id, "bold"), f": {resized.text}, as ", (resized.layout, "bold"))
    make_console().print(line)
    return 0
