"""The report of a study: one HTML page, and the study as plain data."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError, YunluError
from yunlu.core.files import write_atomically
from yunlu.core.settings import read_settings
from yunlu.core.units import show_duration
from yunlu.render.format import (
    model_path,
    report_link,
    run_path,
    shorten,
    show_dollars,
    show_param,
    show_range,
    show_value,
    train_command,
)
from yunlu.render.html_page import render_html
from yunlu.render.i18n import known_text, same, text
from yunlu.render.study_figures import (
    TrialRanks,
    curves_figure,
    forecast_figure,
    front_figure,
    importance_figure,
    pair_figure,
    parallel_figure,
    progress_figures,
    slice_figure,
    sparkline,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log
from yunlu.tuning.facts import best_point, rank_trials, wall_s
from yunlu.tuning.importance import FEWEST, compute_importance, expect_finals, rank_trials_by_value
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from yunlu.render.i18n import BilingualText
    from yunlu.tuning.facts import StudyView, TrialFacts
    from yunlu.tuning.importance import Importance
    from yunlu.tuning.values import Dimension


def dump_study(view: StudyView) -> dict[str, Any]:
    """Everything that is known of a study."""
    return {
        "name": view.name,
        "dir": str(view.path),
        "storage": view.storage,
        "job": view.source,
        "state": view.state,
        "reason": view.reason,
        "metrics": list(view.metrics),
        "directions": list(view.directions),
        "method": view.method,
        "stop": view.stop_rule,
        "rungs": view.rungs,
        "devices": view.devices,
        "began_at": view.began_at,
        "ended_at": view.ended_at,
        "device_seconds": view.spent_s,
        "dollars": view.spent_dollars,
        "limits": {
            "trials": view.trials_limit,
            "dollars": view.dollars_limit,
            "deadline_at": view.deadline_at,
        },
        "forecast": None if view.forecast is None else dict(view.forecast),
        "space": {dimension.name: _dump_dimension(dimension) for dimension in view.dimensions},
        "best": dump_best(view),
        "front": [facts.number for facts in view.front],
        "trials": [dump_trial(facts) for facts in view.trials],
    }


def dump_best(view: StudyView) -> dict[str, Any] | None:
    """The best trial, and what to do with it."""
    if view.best is None:
        return None
    model = model_path(view, view.best)
    return {
        **dump_trial(view.best),
        "model": None if model is None else str(model),
        "command": train_command(view, view.best),
    }


def dump_trial(facts: TrialFacts) -> dict[str, Any]:
    """One trial."""
    copied = facts.trial.copied_from
    return {
        "number": facts.number,
        "state": facts.state.value,
        "params": dict(facts.params),
        "value": facts.value,
        "values": None if facts.values is None else list(facts.values),
        "rung": facts.trial.rung,
        "curve": [[rung, *values] for rung, values in facts.curve],
        "run": facts.run,
        "devices": facts.devices,
        "device_seconds": facts.device_seconds,
        "dollars": facts.dollars,
        "began_at": facts.began_at,
        "ended_at": facts.ended_at,
        "copied_from": None if copied is None else list(copied),
        "reason": facts.reason,
        "error": facts.error,
    }


def _dump_dimension(dimension: Dimension) -> dict[str, Any]:
    if dimension.choices:
        shape: dict[str, Any] = {"choices": list(dimension.choices)}
    else:
        shape = {
            "low": dimension.low,
            "high": dimension.high,
            "log": dimension.log,
            "is_int": dimension.is_int,
        }
    return {**shape, "when": {name: list(values) for name, values in dimension.when.items()}}


_MOST_ROWS = 300
_MOST_SLICES = 12
_MOST_ERRORS = 5


def write_report(view: StudyView, path: Path | None = None) -> Path:
    """Write the page into the study's directory, or elsewhere; where it lies."""
    is_named, path = path is not None, path or view.path / "report.html"
    page = render_page(view, language=read_settings().language, beside=path)
    try:
        write_atomically(path, page, private=not is_named)
    except OSError as error:
        raise StoreError(
            f"The page cannot be written to {path}: {error.strerror or error}.",
            hint="Free some space, or name a place that you may write to.",
        ) from error
    return path


def write_run_reports(view: StudyView) -> None:
    """Write the reports of the trials' runs that are no longer active and have no report yet."""
    # Calibration, which learns from reports, is slow to import.
    from yunlu.render.run_report import write_report as write_run_report  # noqa: PLC0415

    for facts in view.trials:
        path = run_path(view, facts)
        if path is None or not path.is_dir() or facts.state is TrialState.RUNNING:
            continue
        run = open_run(path)
        written, changed = run.stat(Document.REPORT_PAGE), run.stat(Log.EVENTS)
        if changed and (written is None or changed.modified_at > written.modified_at):
            with suppress(OSError, YunluError):
                write_run_report(run)


def render_page(
    view: StudyView, *, language: str = "en", beside: Path | None = None, now: float | None = None
) -> str:
    """The whole page; ``language`` (``en`` or ``zh``) is what a reader sees first.

    Args:
        view: The study.
        language: Which of the two languages shows.
        beside: Where the page will lie: links to the runs' reports start there.
        now: The time, where it is not the clock's.
    """
    location = beside or view.path / "report.html"
    judged = [facts.trial for facts in view.trials if facts.state is not TrialState.FAILED]
    ranks = TrialRanks(view=view, ranks=rank_trials_by_value(expect_finals(judged)))
    importance = compute_importance(view)
    ordered = rank_trials(view.trials, best=view.best) if ranks.ranks else list(view.trials)
    curves = curves_figure(ranks)
    return render_html(
        "study.html.j2",
        language=language,
        scripts=["page.js", "study.js"],
        styles=["style.css", "study.css"],
        view=view,
        short=shorten(dimension.name for dimension in view.dimensions),
        cards=list(_cards(view, now or time.time())),
        best=_best(view, location),
        failures=_failures(view),
        progress=[*progress_figures(ranks), *([curves] if curves is not None else [])],
        front=front_figure(ranks),
        space=_space(ranks, importance),
        importance=importance,
        importance_figure=importance_figure(importance) if importance else None,
        fewest=FEWEST,
        judged=len(ranks.ranks),
        rows=[_row(view, facts, location) for facts in ordered[:_MOST_ROWS]],
        comparisons=list(_comparisons(view, now or time.time())),
        facts={str(facts.number): _read_out(view, facts) for facts in view.trials},
    )


def _cards(view: StudyView, now: float) -> Iterator[tuple[BilingualText, str, BilingualText]]:
    """Label, value and remark of each headline number."""
    if (best := view.best) is not None:
        point = best_point(best.trial)
        remark = text("study.card.best_when", number=best.number)
        if point is not None and view.rungs:
            remark = text(
                "study.card.best_of", number=best.number, rung=point.rung, rungs=view.rungs
            )
        label = text("study.card.best", metric=known_text("metric", view.metric))
        yield label, show_value(view.metric, best.value), remark
    counts = [(state, view.count(state)) for state in TrialState]
    remark = same("")
    for state, count in counts:
        if count:
            separator = " · " if remark.en else ""
            remark = remark + f"{separator}{count} " + text(f"study.trial.{state.value}")
    begun = len(view.trials)
    limit = f" / {view.trials_limit}" if view.trials_limit else ""
    yield text("study.card.trials"), f"{begun}{limit}", remark
    if (wall := wall_s(view, now)) is not None:
        yield (
            text("study.card.time"),
            show_duration(wall),
            text("study.card.time_of", device=show_duration(view.spent_s)),
        )
    if view.spent_dollars is not None:
        remark = same("")
        if view.dollars_limit is not None:
            remark = text("study.card.cost_of", limit=show_dollars(view.dollars_limit))
        yield text("study.card.cost"), show_dollars(view.spent_dollars), remark
    done = sum(facts.trial.rung for facts in view.trials)
    # Where the length varies, one that is done was trained to its own end.
    whole = sum(
        facts.trial.rung if facts.state is TrialState.DONE else view.rungs
        for facts in view.trials
        if facts.points
    )
    if view.state != "running" and whole > done > 0:
        remark = text("study.card.saved_how", done=f"{done:,}", whole=f"{whole:,}")
        yield text("study.card.saved"), f"{1 - done / whole:.0%}".replace("%", " %"), remark


def _best(view: StudyView, folder: Path) -> dict[str, Any] | None:
    """The best setting, and what to do with it."""
    facts = view.best
    if facts is None:
        return None
    return {
        "facts": facts,
        "rows": [
            (dimension, facts.params[dimension.name])
            for dimension in view.dimensions
            if dimension.name in facts.params
        ],
        "command": train_command(view, facts),
        "model": model_path(view, facts),
        "run": run_path(view, facts),
        "link": report_link(view, facts, folder),
        "ranges": {dimension.name: show_range(dimension) for dimension in view.dimensions},
    }


def _failures(view: StudyView) -> list[tuple[str, str, int]]:
    """Each error once, with the trials that met it."""
    met: dict[str, list[int]] = {}
    for facts in view.trials:
        if facts.state is TrialState.FAILED:
            met.setdefault(facts.error or facts.reason or "–", []).append(facts.number)
    result = sorted(met.items(), key=lambda entry: -len(entry[1]))
    return [
        (
            error,
            ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else ""),
            len(numbers),
        )
        for error, numbers in result[:_MOST_ERRORS]
    ]


def _space(ranks: TrialRanks, importance: Importance | None) -> dict[str, Any]:
    """The figures of the search space, the most important dimension first."""
    shares: Mapping[str, float] = importance.shares if importance else {}
    order = sorted(ranks.view.dimensions, key=lambda item: -shares.get(item.name, 0.0))
    title = text("study.pair.title" if importance else "study.pair.first")
    slices = [slice_figure(ranks, dimension) for dimension in order[:_MOST_SLICES]]
    return {
        # Neighbours explain each other best: the most important stands next to the result.
        "parallel": parallel_figure(ranks, order[::-1]),
        "pair": pair_figure(ranks, *order[:2], title=title) if len(order) > 1 else None,
        "slices": [figure for figure in slices if figure is not None],
    }


def _row(view: StudyView, facts: TrialFacts, location: Path) -> dict[str, Any]:
    rungs = max(view.rungs, facts.trial.rung)
    copied = facts.trial.copied_from
    return {
        "facts": facts,
        "best": view.best is not None and view.best.number == facts.number,
        "spark": sparkline(view, facts),
        "rung": f"{facts.trial.rung} / {rungs}" if rungs else "–",
        "link": report_link(view, facts, location),
        "copied": text("study.trials.copied", number=copied[0], rung=copied[1]) if copied else "",
        "reason": facts.error or facts.reason,
    }


def _read_out(view: StudyView, facts: TrialFacts) -> list[tuple[Any, Any]]:
    """What pointing at a trial tells."""
    short = shorten(dimension.name for dimension in view.dimensions)
    state = text(f"study.trial.{facts.state.value}")
    rows: list[tuple[Any, Any]] = [(f"#{facts.number}", (state.en, state.zh))]
    for index, metric in enumerate(view.metrics):
        reached = facts.values[index] if facts.values is not None else None
        rows.append((metric, show_value(metric, reached)))
    rows += [(short.get(name, name), show_param(value)) for name, value in facts.params.items()]
    return rows


def _comparisons(view: StudyView, now: float) -> Iterator[dict[str, Any]]:
    """What was predicted beside what was measured."""
    if not view.forecast:
        return
    measured = {
        "trials": float(len(view.trials)),
        "seconds": wall_s(view, now),
        "dollars": view.spent_dollars,
    }
    for quantity, value in measured.items():
        predicted = view.forecast.get(quantity)
        if predicted is None or value is None:
            continue
        yield {
            "figure": forecast_figure(quantity, predicted, value),
            "is_inside": predicted["low"] <= value <= predicted["high"],
            "is_over": view.state in {"finished", "failed"},
        }
