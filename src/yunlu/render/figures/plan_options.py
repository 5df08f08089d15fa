"""Cost against time of a job's plan options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.render.figures.values import CostTimeFigure, OptionPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.planning.search.options import PlanOption

_HOUR_S = 3600


def plan_options_figure(outcome: PlanOutcome, *, title: str) -> CostTimeFigure:
    """All candidates with a price, their Pareto front, and the options with their intervals."""
    # What costs nothing has no place on a logarithmic axis.
    priced = [(hours, dollars) for hours, dollars, _ in outcome.candidates if dollars > 0]
    front, options = find_front(priced), [_option_point(option) for option in outcome.options]
    # What is far dearer and slower than options and front only squeezes the rest.
    shown = [(option.hours[1], option.dollars[1]) for option in options if option] + front
    return CostTimeFigure(
        title=f"{title}: cost and time of its options (bars: 10 to 90 %)",
        candidates=tuple(priced),
        front=tuple(front),
        options=tuple(options),
        hours=(min(at[0] for at in shown) / 2, max(at[0] for at in shown) * 3) if shown else None,
        dollars=(min(at[1] for at in shown) / 2, max(at[1] for at in shown) * 4) if shown else None,
    )


def find_front(candidates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both cost and time, the quickest first."""
    front: list[tuple[float, float]] = []
    for candidate in sorted(candidates):
        if not front or candidate[1] < front[-1][1]:
            front.append(candidate)
    return front


def _option_point(option: PlanOption) -> OptionPoint | None:
    dollars = option.dollars
    if dollars is None or dollars.value <= 0:
        return None
    hours = option.total_s.times(1 / _HOUR_S)
    hardware = option.hardware
    return OptionPoint(
        name=f"{hardware.devices} x {hardware.device}, {hardware.cloud}",
        hours=(hours.low, hours.value, hours.high),
        dollars=(dollars.low, dollars.value, dollars.high),
    )
