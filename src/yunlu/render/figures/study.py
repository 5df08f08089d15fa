"""A study in pictures, as SVG that fills its box; labels are places for the page to set text.

Every mark carries the number of its trial, so that pointing at one lights up the trial everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from markupsafe import Markup

from yunlu.render.drawing.canvas import (
    HEIGHT,
    WIDTH,
    Picture,
    Upright,
    draw_dots,
    draw_grid,
    draw_path,
    draw_poles,
    frame,
    is_best,
    join,
)
from yunlu.render.drawing.landscape import draw_ground
from yunlu.render.drawing.study_axes import DimensionAxis, count_axis, growing_axis, value_axis
from yunlu.render.i18n.texts import text
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from yunlu.render.drawing.canvas import Shades
    from yunlu.render.drawing.charts import Tick
    from yunlu.render.drawing.study_axes import Axis
    from yunlu.tuning.values import Dimension
    from yunlu.tuning.view import StudyView, TrialFacts

_MOST_LINES = 400
_FLOOR = 0.1
"""Where, under the parallel axes, lines pass that lack a dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One evaluation in the course of the study."""

    at_s: float | None
    spent_s: float
    value: float
    facts: TrialFacts


def draw_best(view: StudyView, shades: Shades) -> Iterator[Picture]:
    """The best so far, over time and over cost."""
    seen = _in_order(view)
    if not seen:
        return
    if all(each.at_s is not None for each in seen):
        places = [each.at_s or 0.0 for each in seen]
        axis = growing_axis(max(places), "duration")
        yield _draw_course(view, seen, places, axis, shades, over="time")
    if view.spent_dollars and view.spent_s:
        price = view.spent_dollars / view.spent_s
        places = [each.spent_s * price for each in seen]
        yield _draw_course(
            view, seen, places, growing_axis(max(places), "dollars"), shades, over="dollars"
        )
    else:
        places = [each.spent_s for each in seen]
        yield _draw_course(
            view, seen, places, growing_axis(max(places), "duration"), shades, over="device"
        )


def draw_curves(view: StudyView, shades: Shades) -> Picture | None:
    """The value of every trial after each evaluation; those given up thin, the best one on top."""
    shown = _shown(view, shades)
    if not shown:
        return None
    rungs = max(view.rungs, *(each.trial.rung for each in shown))
    x, y = count_axis(rungs), _values_of(view, shown)
    lines, points = Markup(""), list[tuple[float, float, int]]()
    for facts in reversed(shown):  # the better, the later, and so on top
        places = [(x.share(rung), y.share(values[0])) for rung, values in facts.curve]
        look = f"{facts.state.value} {shades.look(view, facts)}"
        lines += draw_path(f"curve {look}", [join(places)], number=facts.number)
        if facts.state is not TrialState.DONE:  # where it was left
            lines += draw_path(f"left {look}", [join(places[-1:])], number=facts.number)
        points += [(*place, facts.number) for place in places]
    return Picture(
        id="curves",
        title=text("study.curves.title"),
        svg=frame(draw_grid(y) + lines),
        x_name=text("study.curves.rung"),
        x_ticks=x.ticks(8),
        y_ticks=y.ticks(),
        points=tuple(points),
        note=_left_out(view, shown),
        legend=(
            (text("study.curves.best"), "line q-best"),
            (text("study.curves.done"), "line q0"),
            (text("study.curves.pruned"), "thin q3"),
        ),
        wide=True,
    )


def draw_parallel(view: StudyView, shades: Shades, order: Sequence[Dimension]) -> Picture | None:
    """A line for each trial through its values on every dimension, to what it reached."""
    shown = _shown(view, shades)
    if not shown or not order:
        return None
    result = _values_of(view, shown)
    stride = 1 / len(order)
    uprights = [
        Upright(
            at=place * stride, name=each.name, ticks=_raised(DimensionAxis(dimension=each).ticks(5))
        )
        for place, each in enumerate(order)
    ]
    uprights.append(Upright(at=1.0, name=view.metric, ticks=_raised(result.ticks())))
    drawn, points = Markup(""), list[tuple[float, float, int]]()
    lacking = False
    for facts in reversed(shown):
        places = list[tuple[float, float]]()
        for place, each in enumerate(order):
            there = each.name in facts.params
            lacking |= not there
            axis = DimensionAxis(dimension=each)
            up = _beside(view, axis, facts) if there else None
            places.append((place * stride, 0.0 if up is None else _raise(up)))
        places.append((1.0, _raise(result.share(_value(facts)))))
        drawn += draw_path(
            f"thread {facts.state.value} {shades.look(view, facts)}",
            [join(places)],
            number=facts.number,
        )
        points += [(*place, facts.number) for place in _along(places)]
    poles = draw_poles((each.at for each in uprights), _FLOOR)
    return Picture(
        id="parallel",
        title=text("study.parallel.title"),
        svg=frame(poles + drawn),
        uprights=tuple(uprights),
        points=tuple(points),
        note=text("study.parallel.lacking") if lacking else _left_out(view, shown),
        wide=True,
    )


def draw_pair(
    view: StudyView, shades: Shades, first: Dimension, second: Dimension, *, title: Markup
) -> Picture | None:
    """The ground that two dimensions span: where trials did well, and where nobody has been."""
    shown = [
        facts for facts in _shown(view, shades) if {first.name, second.name} <= facts.params.keys()
    ]
    if len(shown) < 3:
        return None
    x, y = DimensionAxis(dimension=first), DimensionAxis(dimension=second)
    spots = [(_beside(view, x, facts), _beside(view, y, facts), facts) for facts in shown]
    known = [(left, up, shades.ranks[facts.number]) for left, up, facts in spots]
    ground = draw_ground(known, len(first.choices), len(second.choices), WIDTH, HEIGHT)
    return Picture(
        id="pair",
        title=title,
        svg=frame(ground + draw_dots(view, spots, shades)),
        x_name=Markup("<code>{}</code>").format(first.name),
        y_name=Markup("<code>{}</code>").format(second.name),
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        points=tuple((left, up, facts.number) for left, up, facts in spots),
        star=next(((left, up) for left, up, facts in spots if is_best(view, facts)), None),
        note=text("study.pair.note"),
    )


def draw_slice(view: StudyView, shades: Shades, dimension: Dimension) -> Picture | None:
    """What was reached over one dimension."""
    shown = [facts for facts in _shown(view, shades) if dimension.name in facts.params]
    if not shown:
        return None
    x, y = DimensionAxis(dimension=dimension), _values_of(view, shown)
    spots = [(_beside(view, x, facts), y.share(_value(facts)), facts) for facts in shown]
    return Picture(
        id=f"slice-{dimension.name}",
        title=Markup("<code>{}</code>").format(dimension.name),
        svg=frame(draw_grid(y, 4) + draw_dots(view, spots, shades)),
        x_ticks=x.ticks(4),
        y_ticks=y.ticks(4),
        points=tuple((left, up, facts.number) for left, up, facts in spots),
        star=next(((left, up) for left, up, facts in spots if is_best(view, facts)), None),
    )


def draw_front(view: StudyView, shades: Shades) -> Picture | None:
    """The first two objectives against each other, and what nothing beats in both."""
    shown = [facts for facts in _shown(view, shades) if facts.values is not None]
    if len(view.metrics) < 2 or not shown:
        return None
    values = {facts.number: [*(facts.values or ())] for facts in shown}
    x, y = (
        value_axis(
            [each[place] for each in values.values()],
            view.metrics[place],
            smaller_is_better=view.directions[place] == "minimize",
        )
        for place in (1, 0)
    )
    at = {number: (x.share(each[1]), y.share(each[0])) for number, each in values.items()}
    spots = [(*at[facts.number], facts) for facts in shown]
    edge = sorted(at[facts.number] for facts in view.front if facts.number in at)
    line = draw_path("front", [join(edge)] if len(edge) > 1 else [])
    return Picture(
        id="front",
        title=text("study.front.title"),
        svg=frame(draw_grid(y) + line + draw_dots(view, spots, shades)),
        x_name=Markup("{}").format(view.metrics[1]),
        y_name=Markup("{}").format(view.metrics[0]),
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        points=tuple((left, up, facts.number) for left, up, facts in spots),
        note=text("study.front.note", count=len(view.front)),
        wide=True,
    )


def draw_spark(facts: TrialFacts, axis: Axis, rungs: int) -> Markup:
    """A curve small enough for a cell."""
    across = count_axis(rungs)
    places = [(across.share(rung), axis.share(values[0])) for rung, values in facts.curve]
    if not places:
        return Markup("")
    return frame(draw_path("spark", [join(places)]))


def _draw_course(
    view: StudyView,
    seen: Sequence[_Seen],
    places: Sequence[float],
    x: Axis,
    shades: Shades,
    *,
    over: str,
) -> Picture:
    y = value_axis(
        [_value(facts) for facts in view.trials],
        view.metric,
        smaller_is_better=view.direction == "minimize",
        line=_best_values(view, seen),
    )
    spots = [
        (x.share(place), y.share(each.value), each.facts)
        for place, each in zip(places, seen, strict=True)
    ]
    inside = [spot for spot, each in zip(spots, seen, strict=True) if y.low <= each.value <= y.high]
    steps: list[tuple[float, float]] = []
    for (left, _, _), best in zip(spots, _best_values(view, seen), strict=True):
        if math.isfinite(best):
            steps += [(left, steps[-1][1])] if steps else []
            steps.append((left, y.share(best)))
    steps += [(1.0, steps[-1][1])] if steps else []
    return Picture(
        id=f"best-{over}",
        title=text(f"study.best.{over}"),
        svg=frame(
            draw_grid(y)
            + draw_dots(view, inside, shades, size="speck")
            + draw_path("best", [join(steps)])
        ),
        x_name=text(f"study.best.{over}.axis"),
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        points=tuple((left, up, facts.number) for left, up, facts in inside),
    )


def _best_values(view: StudyView, seen: Sequence[_Seen]) -> list[float]:
    """The best value by each evaluation; not finite as long as there is none."""
    better = min if view.direction == "minimize" else max
    best, found = math.nan, list[float]()
    for each in seen:
        if math.isfinite(each.value):
            best = better(best, each.value) if math.isfinite(best) else each.value
        found.append(best)
    return found


def _in_order(view: StudyView) -> list[_Seen]:
    """Every evaluation, in the order in which they were taken, and what had been spent by then."""
    found: list[tuple[float, int, int, float, float, TrialFacts]] = []
    timed = all(len(facts.times) == len(facts.points) for facts in view.trials)
    for facts in view.trials:
        before_s = 0.0
        for place, (point, (_, values)) in enumerate(zip(facts.points, facts.curve, strict=True)):
            at = facts.times[place] if timed else float(facts.number)
            used_s = max(0.0, point.seconds - before_s)
            before_s = max(before_s, point.seconds)
            found.append((at, facts.number, point.rung, used_s, values[0], facts))
    began_at = view.began_at if view.began_at is not None else min((f[0] for f in found), default=0)
    spent_s, seen = 0.0, list[_Seen]()
    for at, _, _, used_s, value, facts in sorted(found, key=lambda each: each[:3]):
        spent_s += used_s
        at_s = max(0.0, at - began_at) if timed else None
        seen.append(_Seen(at_s=at_s, spent_s=spent_s, value=value, facts=facts))
    return seen


def _shown(view: StudyView, shades: Shades) -> list[TrialFacts]:
    """Trials that have something to show, the best first; of very many the best."""
    known = [facts for facts in view.trials if facts.number in shades.ranks]
    known.sort(key=lambda facts: (not is_best(view, facts), shades.ranks[facts.number]))
    return known[:_MOST_LINES]


def _left_out(view: StudyView, shown: Sequence[TrialFacts]) -> Markup:
    total = sum(bool(facts.points) for facts in view.trials)
    if len(shown) >= total or len(shown) < _MOST_LINES:
        return Markup("")
    return text("study.left_out", shown=len(shown), total=total)


def _values_of(view: StudyView, shown: Iterable[TrialFacts]) -> Axis:
    values = [values[0] for facts in shown for _, values in facts.curve]
    return value_axis(values, view.metric, smaller_is_better=view.direction == "minimize")


def _value(facts: TrialFacts) -> float:
    return facts.value if facts.value is not None else math.nan


def _beside(view: StudyView, axis: DimensionAxis, facts: TrialFacts) -> float:
    """Trials that chose alike stand beside each other; the best one, which has a star, stands true."""
    value = facts.params[axis.dimension.name]
    return axis.share(value) if is_best(view, facts) else axis.share_beside(value, facts.number)


def _along(
    places: Sequence[tuple[float, float]], between: int = 6
) -> Iterator[tuple[float, float]]:
    """Points on a line close enough for a pointer to find it anywhere."""
    for (left, low), (right, high) in pairwise(places):
        for step in range(between):
            share = step / between
            yield left + share * (right - left), low + share * (high - low)
    yield places[-1]


def _raise(share: float) -> float:
    return _FLOOR + share * (1 - _FLOOR)


def _raised(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    return tuple(type(tick)(at=_raise(tick.at), label=tick.label) for tick in ticks)
