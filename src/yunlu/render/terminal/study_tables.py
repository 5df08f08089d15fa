"""A study in the terminal: its trials as a table, its progress and answer as lines, live while it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from yunlu.core.units import show_duration
from yunlu.render.format import (
    model_path,
    run_path,
    shorten,
    show_amount,
    show_dollars,
    show_estimate,
    show_param,
    show_value,
    train_command,
)
from yunlu.render.terminal.line_breaks import Hanging
from yunlu.render.terminal.page import (
    ACCENT,
    TerminalConsole,
    in_language,
    indented,
    padded_label,
    plain_table,
    print_lines,
    print_note,
)
from yunlu.render.terminal.report_summary import sparkline
from yunlu.tuning.facts import rank_trials, wall_s
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from yunlu.render.terminal.fitting_table import FittingTable
    from yunlu.tuning.facts import StudyView, TrialFacts
    from yunlu.tuning.values import Dimension

STANDING = {
    TrialState.WAITING: ("○", "cyan"),
    TrialState.RUNNING: ("●", "bold green"),
    TrialState.HELD: ("◑", "yellow"),
    TrialState.PRUNED: ("×", "dim"),
    TrialState.DONE: ("✔", "green"),
    TrialState.FAILED: ("✘", "bold red"),
}
STATES = {
    "running": ("●", "bold green"),
    "finished": ("✔", "green"),
    "stopped": ("■", "yellow"),
    "failed": ("✘", "bold red"),
}
_CURVE = 12
_LONG = 66
"""Characters of a command that fit beside its name on most screens."""
_RULER = TerminalConsole(width=10_000)
"""Measures tables; never prints."""
_QUANTITIES = {"trials": "trials", "seconds": "time", "dollars": "cost"}


def print_block(console: Console, block: RenderableType) -> None:
    """Print it one space from the edge."""
    console.print(indented(block))
    console.file.flush()


def study_page(
    view: StudyView, *, now: float, width: int, rows: int | None = None
) -> RenderableType:
    """The study at a glance: its title, its trials, how far it is."""
    parts: list[RenderableType] = [Hanging(title_line(view), hang=2), Text("")]
    if view.trials:
        parts += [trials_table(view, width=width, rows=rows), Text("")]
    else:
        parts += [Text("no trial has begun", style="dim"), Text("")]
    parts.append(progress_line(view, now=now))
    return Group(*parts)


def title_line(view: StudyView) -> Text:
    """Name, state, what is sought and how."""
    sign, style = STATES[view.state]
    verbs = {"minimize": "least", "maximize": "most"}
    sought = ", ".join(
        f"{verbs[direction]} {metric}"
        for metric, direction in zip(view.metrics, view.directions, strict=True)
    )
    text = Text.assemble((view.name, "bold"), "  ", (f"{sign} {view.state}", style), f"  {sought}")
    if how := ", ".join(filter(None, (view.method, view.stop_rule))):
        text.append(f"  {how}", style="dim")
    if view.reason:
        text.append(f"  {view.reason}", style="dim")
    return text


def trials_table(view: StudyView, *, width: int, rows: int | None = None) -> RenderableType:
    """A row for each trial, the best first; of more than fit the best, and those that run."""
    shown = choose_rows(view, rows)
    short = shorten(dimension.name for dimension in view.dimensions)
    fields, without = list(view.dimensions), list[str]()
    optional = ["curve", "rung", "dev", "cost", "device time"]
    table = _build_table(view, shown, fields, short)
    while (len(fields) > 1 or optional) and _RULER.measure(table).maximum > width:
        if len(fields) > 1:
            fields.pop()
        else:
            without.append(optional.pop(0))
        table = _build_table(view, shown, fields, short, without)
    left = len(view.trials) - len(shown)
    notes = [f"{left} more: yunlu study show {view.name} --all"] if left else []
    hidden = [short[dimension.name] for dimension in view.dimensions if dimension not in fields]
    if hidden := [*hidden, *without]:
        notes.append(f"not shown: {', '.join(hidden)}")
    return Group(table, *(Hanging(Text(note, style="dim"), hang=2) for note in notes))


def _build_table(
    view: StudyView,
    shown: Sequence[TrialFacts],
    fields: Sequence[Dimension],
    short: Mapping[str, str],
    without: Sequence[str] = (),
) -> Table:
    """``without``: columns that there is no room for."""
    table = _all_columns(view, shown, fields, short)
    return table.without(without) if without else table


def _all_columns(
    view: StudyView,
    shown: Sequence[TrialFacts],
    fields: Sequence[Dimension],
    short: Mapping[str, str],
) -> FittingTable:
    table = plain_table()
    table.collapse_padding = True
    table.add_column("", justify="right", no_wrap=True)
    for dimension in fields:
        table.add_column(short[dimension.name], justify="right", no_wrap=True)
    table.add_column("curve", no_wrap=True, min_width=min(_CURVE, max(view.rungs, 5)))
    table.add_column("rung", justify="right", no_wrap=True)
    for metric in view.metrics:
        table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    running = view.state == "running"
    if running:
        table.add_column("dev", justify="right", no_wrap=True)
    priced = view.spent_dollars is not None
    table.add_column("cost" if priced else "device time", justify="right", no_wrap=True)
    for facts in shown:
        sign, style = STANDING[facts.state]
        best = view.best is not None and facts.number == view.best.number
        table.add_row(
            Text(f"{facts.number}", style=f"bold {ACCENT}" if best else "dim"),
            *(_param(facts, dimension) for dimension in fields),
            Text(_curve(facts), style=ACCENT if best else "bright_black" if style == "dim" else ""),
            _rung(view, facts),
            *_values(view, facts),
            Text(f"{sign} {facts.state.value}", style=style),
            *([str(facts.devices or "")] if running else []),
            _cost(facts, priced=priced),
            style="dim" if facts.state is TrialState.PRUNED else None,
        )
    return table


def choose_rows(view: StudyView, rows: int | None) -> list[TrialFacts]:
    """The best trials, and running ones in up to half of the rows."""
    ranked = rank_trials(view.trials, best=view.best)
    if rows is None or len(ranked) <= rows:
        return ranked
    rows = max(rows, 2)
    running = [facts for facts in ranked if facts.state is TrialState.RUNNING][: rows // 2]
    numbers = {facts.number for facts in running}
    for facts in ranked:
        if len(numbers) < rows:
            numbers.add(facts.number)
    return [facts for facts in ranked if facts.number in numbers]


def progress_text(view: StudyView, *, now: float) -> Text:
    """Trials, time and money, and the best so far, in one line."""
    return Text("  ").join(_progress_lines(view, now=now))


def progress_line(view: StudyView, *, now: float) -> RenderableType:
    """The same in three lines, with a bar while the study runs."""
    lines = _progress_lines(view, now=now)
    share = _progress(view, now) if view.state == "running" else None
    if share is None:
        return Group(*lines)
    grid = Table.grid(padding=(0, 1))
    drawn = ProgressBar(
        total=1, completed=share, width=16, complete_style=ACCENT, finished_style="green"
    )
    for index, line in enumerate(lines):
        grid.add_row("" if index else drawn, line)
    return grid


def _progress_lines(view: StudyView, *, now: float) -> list[Text]:
    limit = f" of {view.trials_limit}" if view.trials_limit else ""
    parts = [f"{len(view.trials)}{limit} trials"]
    if (wall := wall_s(view, now)) is not None:
        left = view.deadline_at - now if view.deadline_at and view.state == "running" else None
        of = f" ({show_duration(max(left, 0))} left)" if left is not None else ""
        parts.append(f"{show_duration(wall)}{of}")
    if view.spent_dollars is not None:
        of = f" of {show_dollars(view.dollars_limit)}" if view.dollars_limit else ""
        parts.append(f"{show_dollars(view.spent_dollars)}{of}")
    lines = [Text(" · ".join(parts)), _counts(view)]
    if view.best is not None:
        value = show_value(view.metric, view.best.value)
        lines.append(
            Text.assemble(
                ("best ", "dim"),
                (f"{view.metric} {value}", f"bold {ACCENT}"),
                (f" (trial {view.best.number})", "dim"),
            )
        )
    return lines


def forecast_block(forecast: Mapping[str, Any]) -> RenderableType:
    """Forecast of trials, time and cost."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for quantity, name in _QUANTITIES.items():
        interval = forecast.get(quantity)
        if interval is None:
            continue
        value, between = show_estimate(quantity, interval)
        grid.add_row(Text(name, style="dim"), Text(value, style="bold"), Text(between, style="dim"))
    notes = [Hanging(Text(f"{note}", style="dim"), hang=2) for note in forecast.get("notes") or ()]
    return Group(Text(in_language("forecast", is_label=True), style=f"bold {ACCENT}"), grid, *notes)


def comparison_block(view: StudyView, *, now: float) -> RenderableType | None:
    """What was predicted beside what came."""
    if not view.forecast:
        return None
    actual = {
        "trials": float(len(view.trials)),
        "seconds": wall_s(view, now),
        "dollars": view.spent_dollars,
    }
    table = plain_table()
    for title in ("", "predicted", "10 to 90 %", "measured"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for quantity, name in _QUANTITIES.items():
        interval, measured = view.forecast.get(quantity), actual[quantity]
        if interval is None or measured is None:
            continue
        inside = interval["low"] <= measured <= interval["high"]
        table.add_row(
            Text(name, style="dim"),
            *show_estimate(quantity, interval),
            Text(show_amount(quantity, measured), style="bold green" if inside else "bold yellow"),
        )
    return table if table.row_count else None


def answer_block(view: StudyView, *, now: float) -> RenderableType:
    """The best setting, and what to do with it."""
    best = view.best
    if best is None:
        return Text("no trial has a value yet", style="dim")
    short = shorten(best.params)
    head = Text.assemble(
        (f"{in_language('best', is_label=True)}  ", f"bold {ACCENT}"),
        (f"{view.metric} {show_value(view.metric, best.value)}", "bold"),
        (f"  trial {best.number}", "dim"),
    )
    setting = Table.grid(padding=(0, 2, 0, 0))
    for name, value in best.params.items():
        row = [Text(short[name]), Text(show_param(value), style="bold")]
        # An empty column is measured too narrow, and the others pay for it.
        more = [Text(name, style="dim")] if any(short[field] != field for field in short) else []
        setting.add_row(*row, *more)
    parts: list[RenderableType] = [head, indented(setting), Text("")]
    if len(view.metrics) > 1:
        parts += [front_table(view), Text("")]
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row(Text("train", style="dim"), Text(_fold(train_command(view, best))))
    if (model := model_path(view, best)) is not None:
        rows.add_row(Text("model", style="dim"), Text(str(model)))
    elif (run := run_path(view, best)) is not None:
        rows.add_row(Text("run", style="dim"), Text(str(run)))
        if best.state is TrialState.HELD and view.state != "running":
            rows.add_row(Text("finish", style="dim"), Text(f"yunlu resume {best.run}"))
    rows.add_row(Text("report", style="dim"), Text(f"yunlu study report {view.name} --open"))
    parts.append(rows)
    compared = comparison_block(view, now=now) if view.state != "running" else None
    return Group(*parts, *([Text(""), compared] if compared is not None else []))


def _fold(command: str) -> str:
    """A long command over several lines, as a shell takes them: it can be copied as it stands."""
    return command if len(command) < _LONG else command.replace(" --set ", " \\\n  --set ")


def front_table(view: StudyView) -> RenderableType:
    """Of several objectives: the trials that no other beats in all."""
    table = plain_table()
    for title in ("nothing beats", *view.metrics):
        table.add_column(title, justify="right", no_wrap=True)
    order = sorted(view.front, key=lambda facts: facts.values or ())
    for facts in order[:20]:
        table.add_row(f"trial {facts.number}", *_values(view, facts))
    return table


def failure_lines(view: StudyView) -> list[Text]:
    """Each error once, and how many trials met it."""
    met: dict[str, int] = {}
    for facts in view.trials:
        if facts.state is TrialState.FAILED:
            error = (facts.error or facts.reason or "it does not say why").splitlines()[0]
            met[error] = met.get(error, 0) + 1
    return [
        Text(f"{count} trial{'s' if count > 1 else ''} failed: {error}", style="red")
        for error, count in met.items()
    ]


def describe_state(facts: TrialFacts) -> str:
    """State of a trial, and the reason, in one line."""
    why = (facts.error or facts.reason).removeprefix(f"{facts.state.value} ").splitlines()
    state = padded_label(facts.state.value, 10)
    return f"{state}  {why[0]}" if why else state


def studies_table(views: Sequence[StudyView], *, now: float) -> Table:
    """A row for each study."""
    table = plain_table(drop=("cost", "began"), dropped_note="yunlu study show NAME")
    table.add_column("study", style="bold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("trials", "best", "time", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("began", no_wrap=True)
    for view in views:
        sign, style = STATES[view.state]
        best, wall = view.best, wall_s(view, now)
        value = "–" if best is None else f"{view.metric} {show_value(view.metric, best.value)}"
        begun = f"{len(view.trials)}" + (f" of {view.trials_limit}" if view.trials_limit else "")
        table.add_row(
            view.name,
            Text(f"{sign} {view.state}", style=style),
            begun,
            value,
            "–" if wall is None else show_duration(wall),
            "–" if view.spent_dollars is None else show_dollars(view.spent_dollars),
            _when(view.began_at),
        )
    return table


def _param(facts: TrialFacts, dimension: Dimension) -> Text:
    if dimension.name not in facts.params:
        return Text("·", style="dim")
    return Text(show_param(facts.params[dimension.name]))


def _curve(facts: TrialFacts) -> str:
    return sparkline([values[0] for _, values in facts.curve], _CURVE) if facts.points else ""


def _rung(view: StudyView, facts: TrialFacts) -> Text:
    if not view.rungs:
        return Text(str(facts.trial.rung or "–"))
    return Text.assemble(str(facts.trial.rung), (f"/{view.rungs}", "dim"))


def _values(view: StudyView, facts: TrialFacts) -> list[Text]:
    values = facts.values or [None] * len(view.metrics)
    best = view.best is not None and facts.number == view.best.number
    return [
        Text(show_value(metric, value), style=f"bold {ACCENT}" if best else "")
        for metric, value in zip(view.metrics, values, strict=True)
    ]


def _cost(facts: TrialFacts, *, priced: bool) -> str:
    if priced:
        return "" if facts.dollars is None else show_dollars(facts.dollars)
    return show_duration(facts.device_seconds) if facts.device_seconds else ""


def _counts(view: StudyView) -> Text:
    text = Text()
    for state in TrialState:
        if count := view.count(state):
            sign, style = STANDING[state]
            text.append(" · " if text else "", style="dim")
            text.append(f"{sign} {count} {state.value}", style=style)
    return text


def _progress(view: StudyView, now: float) -> float | None:
    """Share of the limits that is used up: the largest of trials, money and time."""
    shares: list[float] = []
    if view.trials_limit:
        over = sum(facts.state.is_over or facts.state is TrialState.HELD for facts in view.trials)
        shares.append(over / view.trials_limit)
    if view.dollars_limit and view.spent_dollars is not None:
        shares.append(view.spent_dollars / view.dollars_limit)
    if view.deadline_at and view.began_at and view.deadline_at > view.began_at:
        shares.append((now - view.began_at) / (view.deadline_at - view.began_at))
    return min(1.0, max(shares)) if shares else None


def _when(at: float | None) -> str:
    return "–" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


_FRAME = 12
"""Lines of the screen that are not rows of the table."""
_LINE_EVERY_S = 30.0
_HANG = 24
"""Below what happened to a trial, where it goes on in a second line."""


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
                print_lines(self._console, Text(f" trial {facts.number:<4} {text}"), hang=_HANG)
                self._console.file.flush()
            self._known[facts.number] = facts
        if time.monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = time.monotonic()
            line = Text(" ").append_text(progress_text(view, now=time.time()))
            print_lines(self._console, line, hang=_HANG)

    def note(self, message: str) -> None:
        """A line."""
        print_lines(self._console, Text(f" {message}"), hang=3)
        self._console.file.flush()

    def close(self) -> None:
        """Nothing moves here."""


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
        describe_state(facts)
        if is_first
        else f"{padded_label(facts.state.value, 10)}  as trial {first.number}"
    )
