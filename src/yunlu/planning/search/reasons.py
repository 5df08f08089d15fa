"""One-line reasons why an option won or lost. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.planning.explain import compare, main_wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.plan import Plan
    from yunlu.planning.search.limits import GoalLimits
    from yunlu.spec.goal import Objective

_TIGHT = 0.05
_ALIKE = 1.05
_BEST = {"balanced": "best balance of cost and time", "cost": "cheapest", "time": "fastest"}


def give_reasons(
    options: Sequence[Plan],
    objective: Objective,
    limits: GoalLimits,
    *,
    is_met: bool,
    compared: int = 0,
) -> list[Plan]:
    """The same options, each with its reason; the first reason says whether the limits are met.

    The last so many as are only ``compared`` are not chosen from.
    """
    best = options[0]
    real = options[: len(options) - compared]
    costs = [option.dollars.value for option in real if option.dollars is not None]
    times = [option.total_s.value for option in real if option.dollars is not None]
    least = (_outstanding(costs), _outstanding(times))
    results: list[Plan] = []
    for index, option in enumerate(options):
        parts = [_BEST[objective] if is_met else "nearest to the limits"]
        parts = parts if option is best and option.dollars is not None else []
        parts += _extremes(option, least) if index < len(real) else ["only compared"]
        parts += [] if option is best else _against(option, best)
        parts += [main_wait(option), _memory_words(option), *_doubts(option, limits)]
        reason = "; ".join(dict.fromkeys(word for word in parts if word))
        results.append(_with_reason(option, reason))
    return results


def _outstanding(figures: Sequence[float]) -> float | None:
    """The least, where the others are not all similar."""
    return min(figures) if figures and max(figures) > _ALIKE * min(figures) else None


def _with_reason(option: Plan, reason: str) -> Plan:
    return option.model_copy(update={"reason": reason})


def _extremes(option: Plan, least: tuple[float | None, float | None]) -> list[str]:
    if option.dollars is None:
        return ["price unknown"]
    cheapest, fastest = least
    text = ["cheapest"] if option.dollars.value == cheapest else []
    return [*text, "fastest"] if option.total_s.value == fastest else text


def _against(option: Plan, best: Plan) -> list[str]:
    """Comparison with the first option."""
    parts: list[str] = []
    if option.dollars is not None and best.dollars is not None:
        dollars, least = option.dollars.value, best.dollars.value
        parts += [compare(dollars, least, "dearer"), compare(least, dollars, "cheaper")]
        if least == 0 and dollars > 0:
            parts.append("not free")
    seconds, first = option.total_s.value, best.total_s.value
    return [*parts, compare(seconds, first, "slower"), compare(first, seconds, "faster")]


def _memory_words(option: Plan) -> str:
    return "memory nearly full" if option.headroom < _TIGHT else ""


def _doubts(option: Plan, limits: GoalLimits) -> list[str]:
    """Limits that are met as expected, but not at the 90 % quantile."""
    parts: list[str] = []
    dollars, budget = option.dollars, limits.budget
    if budget is not None and dollars is not None and dollars.value <= budget < dollars.high:
        parts.append("may exceed the budget")
    deadline_s = limits.deadline_s
    if deadline_s is not None and option.total_s.value <= deadline_s < option.total_s.high:
        parts.append("may miss the deadline")
    return parts
