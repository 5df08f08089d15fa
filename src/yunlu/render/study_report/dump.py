"""A study as plain data, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.render.study_report.commands import model_path, train_command

if TYPE_CHECKING:
    from yunlu.tuning.values import Dimension
    from yunlu.tuning.view import StudyView, TrialFacts


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
