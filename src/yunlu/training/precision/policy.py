"""Which modules can use low precision, at which loss scale, and what a loss spike is; pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from yunlu.training.precision.ranges import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from yunlu.training.precision.ranges import FloatFormat, ValueRange

_DECAY = 0.95
_WARM = 20
_DEVIATIONS = 8.0


class SpikeDetector:
    """Detects losses far above the running mean."""

    def __init__(self) -> None:
        self._mean = self._square = 0.0
        self._count = 0

    def add(self, loss: float) -> bool:
        """Add one loss; true if it is a spike. Spikes do not enter the statistics."""
        if not math.isfinite(loss):
            return False
        deviation = math.sqrt(max(self._square - self._mean**2, 0.0))
        if self._count >= _WARM and loss > self._mean + _DEVIATIONS * deviation + abs(self._mean):
            return True
        weight = max(1 - _DECAY, 1 / (self._count + 1))
        self._mean += weight * (loss - self._mean)
        self._square += weight * (loss**2 - self._square)
        self._count += 1
        return False

    def state(self) -> list[float]:
        """State for a checkpoint."""
        return [self._mean, self._square, self._count]

    def restore(self, state: list[float]) -> None:
        """Continue from a checkpoint."""
        self._mean, self._square, count = state
        self._count = int(count)


SMALLEST, LARGEST = 2.0**-14, 2.0**24
"""Bounds: below, halving would end at zero; above, nothing is gained."""


class LossScale:
    """torch's ``GradScaler`` (doubles after 2000 good steps, halves on overflow), kept in bounds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type)
        self.value: float = self._scaler.get_scale()
        self.skips = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from; the same factor for all micro-batches of a step."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, and record whether one is not finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update unless a gradient overflowed, then adjust the scale; true if applied."""
        self._scaler.step(optimizer)
        self._scaler.update()
        # Only an overflow lowers the scale: reading it synchronises with the GPU only once.
        scale = self._scaler.get_scale()
        applied = scale >= self.value
        self.skips += not applied
        self.value = scale
        if not SMALLEST <= scale <= LARGEST:
            self.set(scale)
        return applied

    def set(self, value: float) -> None:
        """Set the scale."""
        self.value = min(max(value, SMALLEST), LARGEST)
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": self.value})

    def skip(self) -> None:
        """Reset the scaler after a skipped step; the scale stays."""
        self._scaler.scale(torch.zeros((), device=self._device))  # initialises the scaler if needed
        self._scaler.update(self.value)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {**self._scaler.state_dict(), "skips": self.skips}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        scaler_state = dict(state)
        self.skips = scaler_state.pop("skips", 0)
        self._scaler.load_state_dict(scaler_state)
        self.value = self._scaler.get_scale()


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
