"""How a study's values and figures read: the same on the page and in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.units import show_duration
from yunlu.render.format import show_metric
from yunlu.tuning.values import TrialState
from yunlu.tuning.view import best_point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.values import Dimension, ParamValue
    from yunlu.tuning.view import StudyView, TrialFacts


def show_param(value: ParamValue) -> str:
    """A value of a setting, short."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e6:
            return f"{value:.0f}"
        return f"{value:.2e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.3g}"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def show_value(metric: str, value: float | None) -> str:
    """A metric as people say it; cost in dollars, time in its units."""
    if value is not None and metric in {"cost", "seconds"}:
        return show_dollars(value) if metric == "cost" else show_duration(value)
    return show_metric(metric, value)


def show_dollars(dollars: float) -> str:
    """Cents where they matter, and less where there is less."""
    if dollars >= 100:
        return f"${dollars:,.0f}"
    if dollars >= 0.1 or dollars == 0:
        return f"${dollars:.2f}"
    return f"${dollars:#.2g}" if dollars >= 0.0001 else "< $0.0001"


def show_range(dimension: Dimension) -> str:
    """What was searched, in a few words."""
    if dimension.choices:
        return ", ".join(map(show_param, dimension.choices))
    log = ", log" if dimension.log else ""
    low, high = (
        int(edge) if dimension.is_int else edge for edge in (dimension.low, dimension.high)
    )
    return f"{show_param(low)} … {show_param(high)}{log}"


def show_amount(quantity: str, amount: float) -> str:
    """A figure of the forecast with its unit."""
    if quantity == "trials":
        return f"{amount:.0f}"
    return show_duration(amount) if quantity == "seconds" else show_dollars(amount)


def wall_s(view: StudyView, now: float) -> float | None:
    """Seconds from the study's beginning to its end, or until now; while it rested do not count."""
    if view.began_at is None:
        return None
    return max(0.0, (view.ended_at or now) - view.began_at - view.rested_s)


def rank_trials(trials: Sequence[TrialFacts], *, best: TrialFacts | None) -> list[TrialFacts]:
    """The best first, then by value; those without one after them, failures last."""

    def place(facts: TrialFacts) -> tuple[bool, bool, bool, float, int]:
        point = best_point(facts.trial)
        return (
            best is None or facts.number != best.number,
            facts.state is TrialState.FAILED,
            point is None,
            0.0 if point is None else point.value,
            facts.number,
        )

    return sorted(trials, key=place)
