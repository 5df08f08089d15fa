"""``yunlu show``: one run on one screen."""

from __future__ import annotations

from yunlu.client.connect import default_client
from yunlu.render.terminal.page import make_console, print_value


def show(run: str = "last", /, *, json: bool = False) -> int:
    """Show one run: job, state, plan, evaluations, checkpoints, warnings, paths.

    Args:
        run: Its id, a unique prefix of it, or: last.
        json: Print the same as JSON.
    """
    details = default_client().show(run)
    if json:
        print_value(details)
        return 0
    from yunlu.render.terminal.run_page import path_lines, run_page  # noqa: PLC0415 (slow)

    console = make_console()
    console.print(run_page(details))
    for line in path_lines(details.paths):
        console.print(line, soft_wrap=True)
    return 0
