"""A run in a notebook: bar, curves, evaluations and plan as HTML that needs no script.

The same drawing serves while the run goes on and afterwards. It is one block with a style of its own,
readable on a light and on a dark page; where a viewer drops styles and pictures, the figures remain.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from yunlu.core.settings import read_settings
from yunlu.core.units import show_duration, show_number
from yunlu.jobs.run_log import MetricRecord
from yunlu.render.figure_values import LineFigure, Series, fit_axis, step_axis
from yunlu.render.format import metric_unit, show_metric
from yunlu.render.html_page import render_fragment
from yunlu.render.i18n import BilingualText, known_text, text
from yunlu.render.terminal.event_lines import prediction_line
from yunlu.render.terminal.run_display import DisplayedProgress
from yunlu.runs.events import Evaluated, ProgressReported, StateChanged
from yunlu.runs.fold import headline
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yunlu.jobs.curve_buckets import Point
    from yunlu.jobs.run_log import FollowedItem
    from yunlu.render.figure_values import LineStyle, Unit

_MOST_POINTS = 240
_MOST_ROWS = 6
_UPDATE_EVERY_S = 0.4
_PADDING = 0.06


class BoundedCurve:
    """A curve of any length in bounded memory: each point is the mean of as many steps as it must be."""

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self._most, self._stride = most, 1
        self._points: list[Point] = []
        self._sum, self._count = 0.0, 0

    def add(self, step: int, value: float) -> None:
        """Add the next step; an earlier one takes back what came after it."""
        if self._points and step <= self._points[-1][0]:
            self._points = [point for point in self._points if point[0] < step]
            self._sum, self._count = 0.0, 0
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count >= self._stride:
            self._points.append((step, self._sum / self._count))
            self._sum, self._count = 0.0, 0
        if len(self._points) >= 2 * self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [(last, (one + other) / 2) for (_, one), (last, other) in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[Point]:
        """In the order of the steps."""
        return list(self._points)


class NotebookView:
    """What a notebook shows of one run; takes its events and metrics one at a time."""

    def __init__(self, run: str) -> None:
        """``run``: its id."""
        self.run = run
        self._progress, self._loss = DisplayedProgress(), BoundedCurve()
        self._phase = ""

    def take(self, item: FollowedItem) -> None:
        """Take in one event or metric record."""
        self._progress.take(item)
        if isinstance(item, MetricRecord):
            self._phase = ""
            if "loss" in item.record:
                self._loss.add(int(item.record["step"]), float(item.record["loss"]))
        elif isinstance(item, ProgressReported):
            self._phase = item.phase
        elif isinstance(item, StateChanged):
            self._phase = ""

    def take_all(self, items: Iterable[FollowedItem]) -> NotebookView:
        """Take in many, and return this view."""
        for item in items:
            self.take(item)
        return self

    @property
    def state(self) -> RunState:
        """Of the run."""
        return self._progress.view.state

    def to_text(self) -> str:
        """One line, for a notebook without HTML."""
        parts = [self.run, known_text("state", self.state).en.lower()]
        if self._progress.record:
            parts.append(self._progress.where())
        if (newest := self._headline_evaluation()) is not None:
            name, value = headline(newest, self._metric)
            parts.append(f"{newest.split} {name} {show_metric(name, value)}")
        return "  ".join(parts)

    def to_html(self) -> str:
        """The whole block."""
        language = read_settings().language
        view = self._progress.view
        return render_fragment(
            "notebook.html.j2",
            style="notebook.css",
            say=partial(_in, language),
            run=self.run,
            state=self.state,
            about=list(self._about()),
            share=self._share(),
            where=self._where(),
            figures=list(self._figures()),
            phase="" if not self.state.is_active else self._phase,
            charts=list(self._charts()),
            rows=self._rows(),
            names=self._metric_names(),
            plan=view.plan,
            predicted="" if view.plan is None else prediction_line(view.plan.prediction).plain,
            warnings=[event.message for event in view.warnings],
            error=view.error if self.state.is_failure else None,
            reason=view.reason if self.state is not RunState.PENDING else None,
        )

    @property
    def _metric(self) -> str | None:
        plan = self._progress.view.plan
        return None if plan is None or plan.best_metric == "auto" else plan.best_metric

    def _about(self) -> Iterator[str]:
        view = self._progress.view
        if view.model is not None:
            yield view.model.name
        if view.data is not None:
            yield view.data.source
        if (workers := self._progress.workers()) is not None:
            yield workers

    def _share(self) -> float | None:
        """Done of all steps; None while nothing is known."""
        progress = self._progress
        if self.state is RunState.FINISHED:
            return 1.0
        if not progress.steps or not progress.record:
            return 0.0 if self.state.is_active else None
        return min(progress.record["step"] / progress.steps, 1.0)

    def _where(self) -> str:
        progress = self._progress
        if not progress.record:
            return ""
        left = progress.remaining_s if self.state.is_active else None
        return progress.where() + (f"  ·  ETA {show_duration(left)}" if left is not None else "")

    def _figures(self) -> Iterator[tuple[str, str]]:
        newest = self._headline_evaluation()
        if newest is not None:
            name, value = headline(newest, self._metric)
            yield f"{newest.split} {name}", show_metric(name, value)
        yield from ((name, shown) for name, shown in self._progress.figures() if name != "skipped")

    def _headline_evaluation(self) -> Evaluated | None:
        scored = self._progress.view.evaluations
        tested = [event for event in scored if event.split == "test"]
        return (tested or list(scored) or [None])[-1]

    def _charts(self) -> Iterator[LineFigure]:
        scored = [event for event in self._progress.view.evaluations if event.split == "validation"]
        curves: list[tuple[str, list[Point], LineStyle]] = [
            ("train_loss", self._loss.points, "line"),
            ("validation_loss", [(event.step, event.loss) for event in scored], "dots"),
        ]
        if any(len(points) > 1 for _, points, _ in curves):
            yield _figure("loss", text("curve.loss"), curves)
        name = self._metric
        if name is None or name == "loss":
            return
        points = [(event.step, event.metrics[name]) for event in scored if name in event.metrics]
        if len(points) > 1:
            title = known_text("metric", name)
            unit = metric_unit(name, [value for _, value in points])
            yield _figure(f"validation-{name}", title, [("validation", points, "dots")], unit=unit)

    def _metric_names(self) -> list[str]:
        scored = self._progress.view.evaluations
        return list(dict.fromkeys(name for event in scored for name in event.metrics))

    def _rows(self) -> list[dict[str, Any]]:
        """The newest evaluations, and always the test."""
        scored, names = self._progress.view.evaluations, self._metric_names()
        return [
            {
                "split": event.split,
                "step": f"{event.step:,}",
                "loss": show_number(event.loss),
                "metrics": [show_metric(name, event.metrics.get(name)) for name in names],
            }
            for index, event in enumerate(scored)
            if event.split == "test" or index >= len(scored) - _MOST_ROWS
        ]


class NotebookDisplay:
    """A live block below the cell that trains; its last state stays in the notebook."""

    def __init__(self, view: NotebookView) -> None:
        from IPython.display import display  # noqa: PLC0415 (there in every notebook, and only there)

        self._view, self._shown_at, self._is_drawn = view, 0.0, True
        self._handle: Any = display(self._bundle(), raw=True, display_id=True)

    def show(self, item: FollowedItem) -> None:
        """Take in an item, to be drawn."""
        self._view.take(item)
        self._is_drawn = False

    def draw_if_due(self) -> None:
        """Draw what is new, a few times a second at most; to be called also where nothing is new."""
        now = time.monotonic()
        if not self._is_drawn and now - self._shown_at >= _UPDATE_EVERY_S:
            self._shown_at, self._is_drawn = now, True
            self._update()

    def note(self, message: str) -> None:
        """A message below the cell."""
        sys.stderr.write(f"{message}\n")

    def close(self) -> None:
        """Draw the last state."""
        self._update()

    def _update(self) -> None:
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        return {"text/html": self._view.to_html(), "text/plain": self._view.to_text()}


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Nothing is imported to find out."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _figure(
    key: str,
    title: BilingualText,
    curves: list[tuple[str, list[Point], LineStyle]],
    *,
    unit: Unit = "number",
) -> LineFigure:
    shown = [curve for curve in curves if curve[1]]
    return LineFigure(
        id=key,
        title=title,
        x=step_axis([step for _, points, _ in shown for step, _ in points], text("step")),
        y=fit_axis(
            [value for _, points, _ in shown for _, value in points],
            unit=unit,
            padding=_PADDING,
            ticks=4,
        ),
        series=tuple(
            Series(
                key=name,
                name=known_text("series", name),
                x=tuple(step for step, _ in points),
                y=tuple(value for _, value in points),
                colour=1 if style == "line" else 3,
                style=style,
            )
            for name, points, style in shown
        ),
    )


def _in(language: str, shown: BilingualText | str) -> str:
    """A text in the reader's language: a notebook has no switch."""
    if isinstance(shown, str):
        return shown
    return shown.zh if language == "zh" else shown.en
