"""The search for fast settings: one after the other, each against the best so far, in a budget."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from yunlu.core.value import Value
from yunlu.planning.plan import AutotuneTrial, StepSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_UNTRIED = {False: "the run is too short to try another", True: "nothing else runs here"}


class SettingsTimer(Protocol):
    """Times settings on the real model."""

    def compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        """Seconds per sample with each, taken in turns; none where the second does not run."""
        ...

    def comparison_s(self, settings: StepSettings) -> float:
        """About how long a comparison takes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that may be set in several ways."""

    field: str
    """The field of ``StepSettings``."""
    options: Callable[[StepSettings], Sequence[StepSettings]]
    """What else it could be."""
    worth: float = 1.05
    """How much faster an option must be: below that, it is noise or not worth its side effects."""
    extra_s: float = 0.0
    """What trying costs besides the timing: a compiler's work."""
    always: bool = False
    """Tried in the shortest run too: the wrong choice may cost many times the trial."""

    @property
    def name(self) -> str:
        """For people."""
        return self.field.replace("_", "-")


class TunedSettings(Value):
    """What a search ended with."""

    settings: StepSettings
    reasons: dict[str, str]
    """Why each setting that had a choice is what it is, by field."""
    trials: tuple[AutotuneTrial, ...]


def search(
    meter: SettingsTimer,
    start: StepSettings,
    levers: Sequence[Knob],
    budget_s: Callable[[StepSettings], float],
) -> tuple[TunedSettings, float]:
    """Pull each lever in turn; returns what was found and the seconds it took.

    ``budget_s`` gives what may be spent in all, from the best settings so far: what a faster one
    saves is not there to be spent.
    """
    settings, trials, reasons = start, list[AutotuneTrial](), dict[str, str]()
    spent_s = 0.0
    for lever in levers:
        options = lever.options(settings)
        began_at = perf_counter()
        tried: list[tuple[float, StepSettings, float]] = []
        failed = False
        for option in options:
            needed_s = meter.comparison_s(settings) + lever.extra_s
            if not lever.always and spent_s + needed_s > budget_s(settings):
                break
            outcome = meter.compare(settings, option)
            spent_s += perf_counter() - began_at
            began_at = perf_counter()
            failed = failed or outcome is None
            if outcome is not None:
                before_s, after_s = outcome
                tried.append((before_s / max(after_s, 1e-12), option, after_s))
        winner = max(tried, key=lambda one: one[0], default=None)
        keeps = winner is not None and winner[0] >= lever.worth
        trials += [
            AutotuneTrial(
                name=lever.name,
                value=str(getattr(option, lever.field)),
                sample_s=seconds,
                speedup=speedup,
                kept=keeps and winner is not None and option == winner[1],
            )
            for speedup, option, seconds in tried
        ]
        if tried:
            reasons[lever.field] = _reason(lever, settings, tried, kept=keeps)
        elif options:
            reasons[lever.field] = _UNTRIED[failed]
        if keeps and winner is not None:
            settings = winner[1]
    return TunedSettings(settings=settings, reasons=reasons, trials=tuple(trials)), spent_s


def _reason(
    lever: Knob, before: StepSettings, tried: list[tuple[float, StepSettings, float]], *, kept: bool
) -> str:
    speedup, option, _ = max(tried, key=lambda one: one[0])
    now = getattr(before, lever.field)
    if kept and speedup < 1:
        return f"{now} would be only {1 / speedup:.3g} × as fast here"
    if kept:
        return f"{speedup:.3g} × as fast as {now} here"
    other = getattr(option, lever.field)
    return f"{other} is {speedup:.3g} × as fast: {'too little' if speedup > 1 else 'no'} gain"
