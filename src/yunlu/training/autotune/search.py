"""Search for fast settings: one knob after the other, each against the best so far, in a budget."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from yunlu.core.value import Value
from yunlu.planning.plan import AutotuneTrial, StepSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_UNTRIED = {False: "the run is too short to try another", True: "no other option works here"}


class SettingsTimer(Protocol):
    """Times settings on the real model."""

    def compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        """Seconds per sample with each, interleaved; None if the second fails."""
        ...

    def comparison_s(self, settings: StepSettings) -> float:
        """Estimated seconds of a comparison."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting with several options."""

    field: str
    """Field of ``StepSettings``."""
    options: Callable[[StepSettings], Sequence[StepSettings]]
    """Alternatives to the current settings."""
    worth: float = 1.05
    """Least speedup to adopt an option: below it is noise, or not worth the side effects."""
    extra_s: float = 0.0
    """Seconds of a trial besides timing: compilation."""
    always: bool = False
    """Try it in the shortest run too: the wrong choice may cost many times the trial."""

    @property
    def name(self) -> str:
        """Display name."""
        return self.field.replace("_", "-")


class TunedSettings(Value):
    """Result of a search."""

    settings: StepSettings
    reasons: dict[str, str]
    """Reason for each setting with options, by field."""
    trials: tuple[AutotuneTrial, ...]


def search(
    timer: SettingsTimer,
    start: StepSettings,
    knobs: Sequence[Knob],
    budget_s: Callable[[StepSettings], float],
) -> tuple[TunedSettings, float]:
    """Try each knob in turn; returns the result and the seconds it took.

    ``budget_s`` computes the total budget from the best settings so far: faster settings make a
    shorter run, with a smaller budget.
    """
    settings, trials, reasons = start, list[AutotuneTrial](), dict[str, str]()
    spent_s = 0.0
    for knob in knobs:
        options = knob.options(settings)
        began_at = perf_counter()
        tried: list[tuple[float, StepSettings, float]] = []
        failed = False
        for option in options:
            needed_s = timer.comparison_s(settings) + knob.extra_s
            if not knob.always and spent_s + needed_s > budget_s(settings):
                break
            outcome = timer.compare(settings, option)
            spent_s += perf_counter() - began_at
            began_at = perf_counter()
            failed = failed or outcome is None
            if outcome is not None:
                before_s, after_s = outcome
                tried.append((before_s / max(after_s, 1e-12), option, after_s))
        winner = max(tried, key=lambda one: one[0], default=None)
        adopts = winner is not None and winner[0] >= knob.worth
        trials += [
            AutotuneTrial(
                name=knob.name,
                value=str(getattr(option, knob.field)),
                sample_s=seconds,
                speedup=speedup,
                is_adopted=adopts and winner is not None and option == winner[1],
            )
            for speedup, option, seconds in tried
        ]
        if tried:
            reasons[knob.field] = _reason(knob, settings, tried, is_adopted=adopts)
        elif options:
            reasons[knob.field] = _UNTRIED[failed]
        if adopts and winner is not None:
            settings = winner[1]
    return TunedSettings(settings=settings, reasons=reasons, trials=tuple(trials)), spent_s


def _reason(
    knob: Knob,
    before: StepSettings,
    tried: list[tuple[float, StepSettings, float]],
    *,
    is_adopted: bool,
) -> str:
    speedup, option, _ = max(tried, key=lambda one: one[0])
    now = getattr(before, knob.field)
    if is_adopted and speedup < 1:
        return f"{now} would be only {1 / speedup:.3g} × as fast here"
    if is_adopted:
        return f"{speedup:.3g} × as fast as {now} here"
    other = getattr(option, knob.field)
    return f"{other} is {speedup:.3g} × as fast: {'too little' if speedup > 1 else 'no'} gain"
