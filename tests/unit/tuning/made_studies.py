"""Studies made by hand, for tables and pages: no training, no storage."""

from __future__ import annotations

import math
import random
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from yunlu.core.value import Value
from yunlu.tuning.facts import Direction, StudyView, TrialFacts, find_best, find_front
from yunlu.tuning.values import Dimension, ParamValue, Point, Trial, TrialState

SCRIPT = "<script>window.hacked = 1</script>"
BEGAN_AT = 1_790_000_000.0
RUNGS = 9
LR, NAME, WIDTH = "train.optimizer.lr", "train.optimizer.name", "model.args.width"
DIMENSIONS = (
    Dimension(name=LR, low=1e-5, high=1e-1, log=True),
    Dimension(name="train.batch", choices=(16, 32, 64, 128)),
    Dimension(name=WIDTH, low=16, high=256, log=True, is_int=True),
    Dimension(name="model.args.dropout", low=0.0, high=0.5),
    Dimension(name=NAME, choices=("adamw", "sgd")),
    Dimension(name="train.optimizer.momentum", low=0.0, high=0.99, when={NAME: ("sgd",)}),
)


def replace(value, **changes):
    """The value with some fields changed."""
    if isinstance(value, Value):
        return value.model_copy(update=changes)
    return replace_fields(value, **changes)


def make_study(
    path: Path,
    count: int = 40,
    *,
    conditional: bool = True,
    direction: Direction = "minimize",
    metric: str = "loss",
    priced: bool = True,
    seed: int = 0,
    **changes: Any,
) -> StudyView:
    """A study of one objective in which the learning rate matters most; most trials stop early."""
    dice, clock_s = random.Random(seed), 0.0
    dimensions = DIMENSIONS if conditional else DIMENSIONS[:4]
    trials: list[TrialFacts] = []
    best_at = [math.inf] * (RUNGS + 1)
    for number in range(count):
        params = draw_params(dice, conditional=conditional)
        points, times, used_s = list[Point](), list[float](), 0.0
        state = TrialState.DONE
        for rung in range(1, RUNGS + 1):
            value = curve_value(params, rung) + dice.gauss(0, 0.004)
            value = -1 / (1 + value) if direction == "maximize" else value
            used_s += 20 + dice.random() * 5
            points.append(Point(rung, (value,), used_s))
            times.append(BEGAN_AT + clock_s + used_s)
            if rung in {1, 3} and value > best_at[rung] + 0.12 * abs(best_at[rung]):
                state = TrialState.PRUNED
            best_at[rung] = min(best_at[rung], value)
            if state is TrialState.PRUNED:
                break
        clock_s += used_s / 4  # four at a time
        trial = Trial(number=number, params=params, state=state, points=tuple(points))
        trials.append(
            TrialFacts(
                trial=trial,
                run=f"digits-{number:03d}",
                directions=(direction,),
                began_at=times[0] - 20,
                ended_at=times[-1],
                times=tuple(times),
                device_seconds=used_s,
                dollars=used_s * 2.0 / 3600 if priced else None,
                reason="outside the best third" if state is TrialState.PRUNED else "",
            )
        )
    spent_s = sum(each.device_seconds for each in trials)
    view = StudyView(
        name="digits-search",
        path=path,
        storage=f"sqlite:///{path}/study.sqlite3",
        source="examples/tune_digits.yaml",
        metrics=(metric,),
        directions=(direction,),
        state="finished",
        reason="40 trials, as asked",
        method="tpe",
        stop_rule="asha",
        rungs=RUNGS,
        dimensions=dimensions,
        trials=tuple(trials),
        best=find_best(trials),
        front=find_front(trials),
        devices=4,
        began_at=BEGAN_AT,
        ended_at=BEGAN_AT + clock_s + 60,
        spent_s=spent_s,
        spent_dollars=spent_s * 2.0 / 3600 if priced else None,
        trials_limit=count,
        dollars_limit=5.0 if priced else None,
        forecast={
            "trials": {"value": 40.0, "low": 31.0, "high": 52.0},
            "seconds": {"value": 900.0, "low": 620.0, "high": 1500.0},
            "dollars": {"value": 1.9, "low": 1.2, "high": 3.0} if priced else None,
            "notes": [],
        },
    )
    return replace(view, **changes)


def with_trials(view: StudyView, *changed: TrialFacts) -> StudyView:
    """The study with some of its trials replaced."""
    by_number = {each.number: each for each in view.trials} | {
        each.number: each for each in changed
    }
    trials = tuple(by_number[number] for number in sorted(by_number))
    return replace(view, trials=trials, best=find_best(trials), front=find_front(trials))


def make_living(path: Path) -> StudyView:
    """A study in the midst of things: running, held, pruned, failed and not yet evaluated trials."""
    view = make_study(path, 24, state="running", reason="", ended_at=None)
    *others, a, b, c, d, e = view.trials
    cut = replace(
        a,
        trial=replace(a.trial, state=TrialState.RUNNING, points=a.points[:1], until=3),
        times=a.times[:1],
        devices=2,
        ended_at=None,
        reason="",
    )
    fresh = replace(
        b,
        trial=replace(b.trial, state=TrialState.RUNNING, points=(), until=1),
        times=(),
        devices=1,
        ended_at=None,
        device_seconds=3.0,
        dollars=0.002,
        reason="",
    )
    failed = replace(
        c,
        trial=replace(c.trial, state=TrialState.FAILED, points=()),
        times=(),
        error=f"The loss is not finite at step 7. {SCRIPT}",
    )
    held = replace(d, trial=replace(d.trial, state=TrialState.HELD), reason="held at rung 1")
    broken = replace(
        e,
        trial=replace(e.trial, state=TrialState.PRUNED, points=(Point(1, (math.nan,), 20.0),)),
        times=e.times[:1],
    )
    return with_trials(replace(view, trials=tuple(others)), cut, fresh, failed, held, broken)


def make_pareto(path: Path) -> StudyView:
    """Loss against cost."""
    view = make_study(path, 40)
    directions: tuple[Direction, ...] = ("minimize", "minimize")
    trials = tuple(
        replace(
            each,
            directions=directions,
            trial=replace(
                each.trial,
                points=tuple(
                    replace(point, values=(point.value, point.seconds * 2.0 / 3600))
                    for point in each.points
                ),
            ),
        )
        for each in view.trials
    )
    return replace(
        view,
        metrics=("loss", "cost"),
        directions=directions,
        trials=trials,
        best=find_best(trials),
        front=find_front(trials),
    )


def draw_params(dice: random.Random, *, conditional: bool) -> dict[str, ParamValue]:
    """A setting, drawn at random."""
    params: dict[str, ParamValue] = {
        LR: float(f"{10 ** dice.uniform(-5, -1):.4g}"),
        "train.batch": dice.choice((16, 32, 64, 128)),
        WIDTH: round(2 ** dice.uniform(4, 8)),
        "model.args.dropout": round(dice.uniform(0, 0.5), 3),
    }
    if conditional:
        params[NAME] = dice.choice(("adamw", "sgd"))
        if params[NAME] == "sgd":
            params["train.optimizer.momentum"] = round(dice.uniform(0, 0.99), 3)
    return params


def curve_value(params: dict[str, ParamValue], rung: int) -> float:
    """A loss that falls with the rungs, to a floor set mostly by the learning rate."""
    lr, width = float(params[LR] or 0), float(params[WIDTH] or 1)
    away = (math.log10(lr) + 2.6) ** 2
    floor = 0.12 + 0.16 * away + 0.05 * (8 - math.log2(width))
    floor += 0.05 if params.get(NAME) == "sgd" else 0.0
    return floor + (1.4 + 0.1 * away) / (rung + 0.5)
