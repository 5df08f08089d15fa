"""Decision which modules can use low precision, and at which loss scale; pure functions."""

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
"""Margin, in powers of two, of an increased scale over the least sufficient one."""
_ANY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAdvice:
    """Advice from one range probe."""

    power: int
    """Loss scale, as a power of two, at which most parameters can use low precision."""
    unfit: dict[str, str]
    """Modules whose values do not fit low precision at this scale, with the reason."""
    judged: frozenset[str]
    """Modules covered by the probe."""


def judge(
    ranges: Mapping[str, Mapping[str, ValueRange]],
    sizes: Mapping[str, int],
    form: FloatFormat,
    *,
    power: int,
    scales: bool,
) -> PrecisionAdvice:
    """Derive the advice from the ranges of a step.

    Args:
        ranges: Ranges by module and kind.
        sizes: Parameters of each module considered when choosing the scale.
        form: Limits of the low precision.
        power: Loss scale of the measured gradients, as a power of two.
        scales: Whether a loss scale is in use.
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
    """The change of scale that keeps most parameters low; 0 if the current scale does."""
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
    """Why the ranges do not fit the format at a scale; None if they do."""
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
