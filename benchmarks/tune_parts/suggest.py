"""How long the next suggestion takes once many trials are known: processor time."""

from __future__ import annotations

import gc
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.tune_parts.figures import Figure
from benchmarks.tune_parts.sampling import sample
from yunlu.tuning.values import Dimension, Point, StartTrial, StudySnapshot, Trial, TrialState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.tuning.values import Params

COUNTS = (100, 1_000, 10_000)
_GOAL_MS = 50.0
_RUNGS = 51
_ASKED = 20
_DIMENSIONS = tuple(Dimension(name=f"x{index}", low=1e-6, high=1.0, log=True) for index in range(8))


def measure(_folder: Path, say: Callable[[str], None], *, quick: bool) -> list[Figure]:
    """Milliseconds of a suggestion: Optuna's random and TPE samplers, and ours."""
    figures: list[Figure] = []
    for count in COUNTS[:-1] if quick else COUNTS:
        for label, ask in (
            ("Optuna random", _ask_optuna_random),
            ("Optuna TPE", _ask_optuna_tpe),
            ("Yunlu", _ask_yunlu),
        ):
            say(f"suggest: {label}, {count:,} trials")
            first_ms, *later_ms = ask(_make_trials(count))
            is_asked = label == "Yunlu" and count == COUNTS[-1]
            figures.append(
                Figure(
                    name=f"{label}, {count:,} trials known",
                    value=float(np.mean(later_ms)),
                    unit="ms",
                    at_most=_GOAL_MS if is_asked else None,
                    compared=f"worst {max(later_ms):.1f} ms; the very first {first_ms:.0f} ms",
                )
            )
    return figures


def _make_trials(count: int) -> list[Trial]:
    """As halving leaves them: of those that reached a rung, a third reached three times as far."""
    rng = np.random.default_rng(0)
    return [
        _end_trial(number, params, int(3 ** min(rng.geometric(2 / 3) - 1, 4)), rng)
        for number, params in enumerate(sample(_DIMENSIONS, count, seed=0))
    ]


def _end_trial(number: int, params: Params, reached: int, rng: np.random.Generator) -> Trial:
    rung = min(reached, _RUNGS)
    logs = np.log10([float(params[each.name] or 0.0) for each in _DIMENSIONS])
    best = float(np.mean((logs / 6 + 0.5) ** 2))
    points = tuple(
        Point(each, (best + 1 / each + 0.01 * float(rng.normal()),), float(each))
        for each in range(1, rung + 1)
    )
    # Held, not given up: all of them stay candidates for going on.
    state = TrialState.DONE if rung == _RUNGS else TrialState.HELD
    return Trial(number=number, params=params, state=state, points=points, until=rung)


def _ask_yunlu(trials: list[Trial]) -> list[float]:
    """A suggestion, and the verdict on what came of it: both are decisions of the method."""
    from benchmarks.tune_parts.own_search import make_yunlu  # noqa: PLC0415

    method = make_yunlu(_DIMENSIONS, _RUNGS, 0)
    rng = np.random.default_rng(1)
    took_ms: list[float] = []
    while len(took_ms) <= _ASKED:
        snapshot = StudySnapshot(trials=tuple(trials), rungs=_RUNGS, workers=4)
        move, chosen_ms = _time(partial(method.choose, snapshot))
        if isinstance(move, StartTrial):
            trial = _end_trial(len(trials), move.params, move.until, rng)
            trials.append(trial)
        else:
            trial = _end_trial(move.number, trials[move.number].params, move.until, rng)
        running = replace(trial, state=TrialState.RUNNING)
        trials[trial.number] = running
        snapshot = StudySnapshot(trials=tuple(trials), rungs=_RUNGS, workers=4)
        _, judged_ms = _time(partial(method.judge, trial.number, snapshot))
        trials[trial.number] = trial
        took_ms.append(chosen_ms + judged_ms)
    return took_ms


def _ask_optuna_random(trials: list[Trial]) -> list[float]:
    import optuna  # noqa: PLC0415

    return _ask_optuna(trials, optuna.samplers.RandomSampler(seed=0))


def _ask_optuna_tpe(trials: list[Trial]) -> list[float]:
    import optuna  # noqa: PLC0415

    return _ask_optuna(trials, optuna.samplers.TPESampler(seed=0))


def _ask_optuna(trials: list[Trial], sampler: Any) -> list[float]:
    import optuna  # noqa: PLC0415

    from benchmarks.tune_parts.optuna_peers import as_distribution  # noqa: PLC0415

    space = {each.name: as_distribution(each) for each in _DIMENSIONS}
    study = optuna.create_study(sampler=sampler)
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=trial.params,
                distributions=space,
                intermediate_values={point.rung: point.value for point in trial.points},
                value=trial.points[-1].value,
            )
            for trial in trials
        ]
    )
    took_ms: list[float] = []
    for _ in range(_ASKED + 1):
        request, ms = _time(lambda: study.ask(space))
        took_ms.append(ms)
        study.tell(request, 1.0)
    return took_ms


def _time(action: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.process_time()
        answer = action()
        return answer, 1e3 * (time.process_time() - started)
