"""Progress of a worker that measures a job."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from yunlu.render.terminal.event_lines import describe
from yunlu.render.terminal.run_display import DisplayedProgress
from yunlu.runs.events import DataOpened, ModelBuilt, ProgressReported, WarningRaised

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from yunlu.runs.events import Event


@contextmanager
def measure_progress(console: Console) -> Generator[Callable[[Event], None]]:
    """A status line with the current phase; data, model and warnings stay above it."""
    progress = DisplayedProgress()
    with console.status("starting") as status:

        def show(event: Event) -> None:
            if isinstance(event, ProgressReported):
                status.update(Text(event.phase))
            elif isinstance(event, DataOpened | ModelBuilt | WarningRaised):
                console.print(describe(event, progress))

        yield show
