"""What ``yunlu.train`` shows while a run goes on: a live block in a notebook, lines on standard error elsewhere."""

from __future__ import annotations

import contextvars
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from yunlu.client import default_client
from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Generator

    from yunlu.jobs.run_log import LogCursor, RunUpdate
    from yunlu.render.terminal.run_display import Display

_JOIN_S = 10.0


def watch(run: str, *, title: str = "", since: LogCursor | None = None, progress: bool) -> None:
    """Follow a run that another process trains until it is no longer active.

    Interrupted, it is asked to save and stop, and the interrupt goes on once it has; interrupted again,
    it is killed.

    Args:
        run: Its directory.
        title: What stands beside its name.
        since: Where to begin.
        progress: Show it.
    """
    client = default_client()
    with shown(run, title=title, progress=progress) as display:
        cursor = since or client.events(run).cursor
        interrupts = 0
        while True:
            try:
                # A generator that was interrupted has ended: each goes on behind what was shown.
                for update in client.follow(run, since=cursor):
                    _show(update, display)
                    cursor = update.cursor
                break
            except KeyboardInterrupt:
                interrupts += 1
                client.stop(run, now=interrupts > 1, wait=False)
                if display is not None:
                    display.note(_stopping(again=interrupts > 1))
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def watch_here(run: str, *, title: str = "", progress: bool) -> Generator[None]:
    """Show a run that this very thread trains meanwhile: another one reads its log."""
    if not progress:
        yield
        return

    def follow_quietly() -> None:
        # A display that fails must not end the training, and has nobody to tell.
        with suppress(Exception), shown(run, title=title, progress=True) as display:
            for update in default_client().follow(run):
                _show(update, display)

    # In the context of the cell that trains: there its output belongs.
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(follow_quietly,), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join(_JOIN_S)


@contextmanager
def shown(run: str, *, title: str, progress: bool) -> Generator[Display | None]:
    """The display for where this process runs; None where nothing is to be shown."""
    if not progress:
        yield None
        return
    display = _open_display(run, title)
    try:
        yield display
    finally:
        display.close()
        with suppress(YunluError, OSError):
            _print_result(run, display)


def _show(update: RunUpdate, display: Display | None) -> None:
    if display is None:
        return
    for item in update.items:
        display.show(item)
    if (draw := getattr(display, "draw_if_due", None)) is not None:
        draw()  # a notebook's block also where nothing is new: the last steps may not be drawn yet


def _open_display(run: str, title: str) -> Display:
    """In a notebook HTML, on a terminal live lines, elsewhere plain lines: on standard error."""
    from yunlu.render import notebook  # noqa: PLC0415 (slow to import, and not needed without progress)
    from yunlu.render.terminal import run_display  # noqa: PLC0415 - as above
    from yunlu.render.terminal.page import make_console, title_text  # noqa: PLC0415 - as above

    name = default_client().run(run).id
    if notebook.is_notebook():
        return notebook.NotebookDisplay(notebook.NotebookView(name))
    console = make_console(stderr=True)
    console.print(title_text(name, title).append("\n"))
    if console.is_terminal:
        return run_display.LiveDisplay(console)
    return run_display.PlainDisplay(console)


def _print_result(run: str, display: Display) -> None:
    """The last line: how it ended. A notebook's block says that by itself."""
    from yunlu.render.format import show_metric  # noqa: PLC0415 (as above)
    from yunlu.render.notebook import NotebookDisplay  # noqa: PLC0415 - as above
    from yunlu.render.terminal.event_lines import event_row  # noqa: PLC0415 - as above
    from yunlu.render.terminal.page import make_console, state_text  # noqa: PLC0415 - as above

    if isinstance(display, NotebookDisplay):
        return
    ended = default_client().run(run)
    row = state_text(ended.state)
    if ended.metric is not None and ended.metric_value is not None:
        row.append(f"  {ended.metric} {show_metric(ended.metric, ended.metric_value)}", "bold")
    if ended.state.can_resume and not ended.state.is_failure:
        row.append(f"  at step {ended.step or 0}; yunlu.resume({ended.id!r}) goes on")
    make_console(stderr=True).print(event_row("", row), soft_wrap=True)


def _stopping(*, again: bool) -> str:
    return "killed" if again else "stopping: saving a checkpoint (interrupt again to kill)"
