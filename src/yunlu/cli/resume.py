"""``yunlu resume``: another attempt at a run that was stopped, failed or was lost."""

from __future__ import annotations

from rich.text import Text

from yunlu.cli.watching import watch_started
from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_json


def resume(
    run: str = "last",
    /,
    *,
    detach: bool = False,
    json: bool = False,
) -> int:
    """Continue a stopped, failed or lost run from its newest good checkpoint.

    Args:
        run: Its id, a unique prefix of it, or: last.
        detach: Return at once; the run continues.
        json: Write every event and metric record as one JSON line, and nothing else.
    """
    client = default_client()
    started = client.resume(run, detach=detach)
    if not started.is_queued:
        title = (
            "" if started.is_launched else Text.assemble("\n resuming    ", (started.id, "bold"))
        )
        return watch_started(client, started, title=title, json=json, detach=detach)
    if json:
        print_json({"run": started.id, "dir": started.dir, "queued": True})
    else:
        then = "; yunlu pool shows when it continues"
        text = Text.assemble("\n queued again  ", (started.id, "bold"), then)
        make_console().print(text)
    return 0
