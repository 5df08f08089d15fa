"""Which modules can be in low precision, and at which loss scale: values in, values out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.training.precision.range_probes import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.training.precision.ranges import FloatFormat, ValueRange

POWERS = range(-14, 25)
"""Loss scales to choose from, as powers of two."""
_INSIDE = 4
"""A scale that must rise goes this far past what is just enough, where there is room."""
_ANY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAdvice:
    """What one look at the ranges says."""

    power: int
    """The loss scale, as a power of two, at which most parameters can be low."""
    unfit: dict[str, str]
    """Modules that low precision cannot hold at this scale, with the reason."""
    judged: frozenset[str]
    """Modules the look says something about."""


def judge(
    ranges: Mapping[str, Mapping[str, ValueRange]],
    sizes: Mapping[str, int],
    form: FloatFormat,
    *,
    power: int,
    scales: bool,
) -> PrecisionAdvice:
    """Weigh the ranges of a step.

    Args:
        ranges: Ranges by module and kind.
        sizes: Parameters of each module that counts when the scale is chosen.
        form: What the low precision can hold.
        power: The loss scale that the gradients were seen at, as a power of two.
        scales: Whether there is a loss scale to choose.
    """
    finite = {
        name: spans
        for name, spans in ranges.items()
        if all(math.isfinite(span.top) for span in spans.values())
    }
    shift = _choose_shift(finite, sizes, form, power) if scales else 0
    unfit: dict[str, str] = {}
    for name, spans in finite.items():
        reason = _misfit(spans, form, power, shift)
        if reason is not None:
            unfit[name] = reason
    return PrecisionAdvice(power=power + shift, unfit=unfit, judged=frozenset(finite))


def _choose_shift(
    ranges: Mapping[str, Mapping[str, ValueRange]],
    sizes: Mapping[str, int],
    form: FloatFormat,
    power: int,
) -> int:
    """The change of scale that leaves most parameters low; none where the one in use does."""
    bands: dict[str, tuple[int, int]] = {}
    for name, spans in ranges.items():
        forward = _common_band(spans, FORWARD, form)
        if name in sizes and forward[0] <= 0 <= forward[1]:
            bands[name] = _common_band(spans, BACKWARD, form)
    shifts = [candidate - power for candidate in POWERS]
    low = {
        shift: sum(sizes[name] for name, band in bands.items() if band[0] <= shift <= band[1])
        for shift in shifts
    }
    best = max(low.values())
    if low.get(0, 0) == best:
        return 0
    good = [shift for shift in shifts if low[shift] == best]
    lower = [shift for shift in good if shift < 0]
    return lower[-1] if lower else good[min(_INSIDE, len(good) - 1)]


def _common_band(
    spans: Mapping[str, ValueRange], kinds: tuple[str, ...], form: FloatFormat
) -> tuple[int, int]:
    bands = [spans[kind].band(form) for kind in kinds if kind in spans]
    return (
        max((lowest for lowest, _ in bands), default=-_ANY),
        min((highest for _, highest in bands), default=_ANY),
    )


def _misfit(
    spans: Mapping[str, ValueRange], form: FloatFormat, power: int, change: int
) -> str | None:
    """Why the format cannot hold the ranges at a scale; none where it can."""
    for kind in FORWARD + BACKWARD:
        span = spans.get(kind)
        if span is None:
            continue
        is_scaled = kind in BACKWARD
        shift = change if is_scaled else 0
        at = f" at loss scale {2.0 ** (power + change):g}" if is_scaled else ""
        lowest, highest = span.band(form)
        if shift > highest:
            return f"{kind} reach {span.top * 2.0**shift:.2g}, too much for {form.name}{at}"
        if shift < lowest:
            return f"{span.lost_share(shift, form):.0%} of its {kind} vanish in {form.name}{at}"
    return None
