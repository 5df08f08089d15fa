"""Display of a running study: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_duration
from yunlu.render.format import shorten, show_param, show_value
from yunlu.render.terminal.console import print_note
from yunlu.render.terminal.page import ACCENT, indented
from yunlu.render.terminal.study_tables import describe_state, progress_line, study_page
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType

    from yunlu.tuning.view import StudyView, TrialFacts

_FRAME = 12
"""Lines of the screen that are not rows of the table."""
_LINE_EVERY_S = 30.0


class StudyDisplay(Protocol):
    """Shows a study while it runs."""

    def show(self, view: StudyView) -> None:
        """Show the current state."""
        ...

    def note(self, message: str) -> None:
        """Show a message that does not come from the study."""
        ...

    def close(self) -> None:
        """Restore the screen."""
        ...


class LiveStudy:
    """For a terminal: the table of trials, kept up to date."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: StudyView | None = None
        self._note = ""
        self._spinner = Spinner("dots", style=ACCENT)
        self._live = Live(
            console=console, get_renderable=self.page, refresh_per_second=4, transient=False
        )
        self._live.start()
        self._is_open = True

    def show(self, view: StudyView) -> None:
        """Drawn at the next refresh."""
        self._view = view

    def note(self, message: str) -> None:
        """A yellow line below."""
        self._note = message

    def close(self) -> None:
        """Leave the table on the screen."""
        if self._is_open:
            self._is_open, self._note = False, ""
            self._live.stop()

    def page(self) -> RenderableType:
        """What the screen shows now."""
        view = self._view
        if view is None:
            line = Table.grid(padding=(0, 1))
            line.add_row(self._spinner, Text("starting the first trials", style="dim"))
            return indented(line)
        rows = max(3, self._console.height - _FRAME)
        page = study_page(view, now=time.time(), width=self._console.width - 2, rows=rows)
        more = [Text(self._note, style="yellow")] if self._note else []
        return indented(Group(page, *more))


class PlainStudy:
    """For a file or a pipe: a line for every change of a trial."""

    def __init__(self, console: Console, known: Iterable[TrialFacts] = ()) -> None:
        """``known``: trials that were shown before."""
        self._console = console
        self._known = {facts.number: facts for facts in known}
        self._told_at = time.monotonic()

    def show(self, view: StudyView) -> None:
        """Print what is new."""
        for facts in view.trials:
            before = self._known.get(facts.number)
            for text in _news(view, before, facts):
                self._print(Text(f" trial {facts.number:<4} {text}"))
            self._known[facts.number] = facts
        if time.monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = time.monotonic()
            self._print(indented(progress_line(view, now=time.time(), bar=False)))

    def note(self, message: str) -> None:
        """A line."""
        self._print(Text(f" {message}"))

    def close(self) -> None:
        """Nothing moves here."""

    def _print(self, block: RenderableType) -> None:
        self._console.print(block, soft_wrap=True)
        self._console.file.flush()


class QuietStudy:
    """For programs, which read the document at the end."""

    def show(self, view: StudyView) -> None:
        """Nothing yet."""

    def note(self, message: str) -> None:
        """On standard error: standard output carries JSON only."""
        print_note(message)

    def close(self) -> None:
        """Nothing to close."""


def _news(view: StudyView, before: TrialFacts | None, facts: TrialFacts) -> list[str]:
    """Changes of a trial since it was last shown."""
    news: list[str] = []
    if before is None:
        short = shorten(dimension.name for dimension in view.dimensions)
        setting = (
            f"{short.get(key, key)}={show_param(value)}" for key, value in facts.params.items()
        )
        source, rung = facts.trial.copied_from or (None, 0)
        origin = f"  from trial {source} at rung {rung}" if rung else ""
        news.append(f"begins      {'  '.join(setting)}{origin}")
    if before is not None and before.state is TrialState.HELD is not facts.state:
        news.append(f"resumed     from rung {before.trial.rung}")
    known = len(before.points) if before is not None else 0
    of = f"/{view.rungs}" if view.rungs else ""
    best_at = next((rung for rung, values in facts.curve if values[0] == facts.value), None)
    for rung, values in facts.curve[known:]:
        shown = "  ".join(
            f"{metric} {show_value(metric, value)}"
            for metric, value in zip(view.metrics, values, strict=True)
        )
        best = view.best is not None and view.best.number == facts.number
        star = "  ★ best so far" if best and rung == best_at else ""
        news.append(f"rung {rung}{of}    {shown}{star}")
    if before is not None and before.devices != facts.devices and facts.devices and before.devices:
        news.append(f"devices     {before.devices} → {facts.devices}")
    changed = before is None or before.state is not facts.state
    if changed and facts.state not in {TrialState.RUNNING, TrialState.WAITING}:
        took = f"  ({show_duration(facts.device_seconds)})" if facts.device_seconds else ""
        news.append(_describe_end(view, facts) + took)
    return news


def _describe_end(view: StudyView, facts: TrialFacts) -> str:
    """An error that another trial had before is not repeated."""
    if facts.state is not TrialState.FAILED:
        return describe_state(facts)
    alike = [trial for trial in view.trials if trial.error == facts.error and trial.ended_at]
    first = min(alike, key=lambda trial: trial.ended_at or 0.0, default=facts)
    is_first = first.number == facts.number
    return (
        describe_state(facts) if is_first else f"{facts.state.value:<10}  as trial {first.number}"
    )
