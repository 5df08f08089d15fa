"""Switch the communication method during training when links change. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.planning.communication.method_choice import choose, explain
from yunlu.planning.communication.methods import METHODS
from yunlu.planning.communication.step_forecast import ASYNCHRONOUS_S, forecast
from yunlu.planning.communication.timing import Clock

if TYPE_CHECKING:
    from yunlu.planning.communication.measurements import WireFigures
    from yunlu.planning.communication.method_choice import MethodDecision
    from yunlu.planning.communication.step_forecast import StepForecast

GAIN = 0.15
"""Least gain of the time to the same loss for a change: about the error of predictions."""
SWITCH_S = 2.0
"""Cost of a switch: new connections and buffers, lost residuals."""
_WORTH = 2.0
"""Factor by which the gain must exceed the cost of a switch."""
_DOUBT = 1.25
"""Predictions that differ by less may be in the wrong order."""
_LEAST_STEPS = 100
"""With fewer steps left a timed comparison does not pay off."""
_WINDOW = 9
_CHANGED = 1.3
"""Ratio of exchange times, in either direction, that counts as a change."""


def should_switch(
    decision: MethodDecision,
    figures: WireFigures,
    *,
    steps_left: int | None = None,
    switch_s: float | None = None,
) -> MethodDecision | None:
    """A new decision where it gains at least 15 % and pays for the switch in the remaining steps."""
    fresh = choose(figures, decision.question)
    if fresh.setting == decision.setting:
        return None
    now = forecast(Clock(figures), decision.question.work, decision.setting)
    gained_s = now.cost_s - fresh.chosen.cost_s
    if gained_s < GAIN * now.cost_s:
        return None
    if switch_s is None:
        is_served = METHODS[fresh.setting.method].kind == "asynchronous"
        switch_s = ASYNCHRONOUS_S if is_served else SWITCH_S
    left = decision.question.work.steps if steps_left is None else steps_left
    if left is not None and gained_s * left < _WORTH * switch_s:
        return None
    return fresh


def renew(decision: MethodDecision, figures: WireFigures) -> MethodDecision:
    """The same setting, predicted for other links."""
    work = decision.question.work
    chosen = forecast(Clock(figures), work, decision.setting)
    reason = explain(figures, work, chosen, decision.plain)
    return decision.model_copy(update={"chosen": chosen, "reason": reason})


def find_faster_method(decision: MethodDecision, *, steps_left: int | None) -> StepForecast | None:
    """The runner-up that might be faster than the choice: torch's all-reduce, or the fastest of ours.

    None where the prediction leaves no doubt, where the user decides, and where it could matter for
    the loss which of the two is taken.
    """
    chosen, pinned = decision.chosen, decision.question.pinned
    is_short = steps_left is not None and steps_left < _LEAST_STEPS
    if is_short or pinned.method is not None or not _is_plain(chosen):
        return None
    is_torch = chosen.setting.method == "all-reduce"
    others = [
        candidate
        for candidate in decision.candidates
        if _is_plain(candidate) and (candidate.setting.method == "all-reduce") != is_torch
    ]
    if not others or not 1 / _DOUBT < others[0].cost_s / chosen.cost_s < _DOUBT:
        return None
    return others[0]


def _is_plain(forecast: StepForecast) -> bool:
    setting = forecast.setting
    return setting.codec == "none" and METHODS[setting.method].kind == "synchronous"


@dataclass(frozen=True, slots=True)
class LinkMonitor:
    """Ratio of recent exchange times to the predicted ones.

    Predictions may be off by a constant share, so the first exchanges say what is usual. The median of a
    few is compared: single ones are late for many reasons.
    """

    predicted_s: float
    ratios: tuple[float, ...] = ()
    usual: float | None = None

    def note(self, seconds: float) -> LinkMonitor:
        """With one more exchange; zero times are ignored."""
        if not (math.isfinite(seconds) and seconds > 0 and self.predicted_s > 0):
            return self
        ratios = (*self.ratios, seconds / self.predicted_s)[-_WINDOW:]
        usual = self.usual
        if usual is None and len(ratios) == _WINDOW:
            return replace(self, ratios=(), usual=statistics.median(ratios))
        return replace(self, ratios=ratios)

    @property
    def ratio(self) -> float | None:
        """Current ratio of exchange time to prediction; None until enough were seen."""
        return statistics.median(self.ratios) if len(self.ratios) == _WINDOW else self.usual

    @property
    def has_changed(self) -> bool:
        """Whether the links should be measured again."""
        if self.usual is None or len(self.ratios) < _WINDOW:
            return False
        change = statistics.median(self.ratios) / self.usual
        return change > _CHANGED or change < 1 / _CHANGED
