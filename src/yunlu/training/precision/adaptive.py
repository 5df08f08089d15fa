"""Adaptive precision: modules move to full precision while they need it, and back.

Every few steps, and after an overflow or a loss spike, a step is probed. The interval between probes
grows while nothing changes, so that a healthy run spends at most a percent on them.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from yunlu.training.device import is_accelerator, kind_of
from yunlu.training.precision.ranges import (
    BACKWARD,
    FORWARD,
    FiniteProbe,
    FloatFormat,
    RangeProbe,
    find_candidates,
    is_covered,
    is_movable,
    run_as_given,
    run_in_full,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from yunlu.training.precision.ranges import ValueRange


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

    def note_norm(self, norm: float) -> None:
        """The gradient norm of this step, on an accelerator."""

    def step(self, optimizer: Optimizer) -> bool:
        """Update unless a gradient overflowed, then adjust the scale; true if applied."""
        self._scaler.step(optimizer)
        self._scaler.update()
        # Only an overflow lowers the scale.
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


class DeviceLossScale(LossScale):
    """The same arithmetic on an accelerator, where torch's scaler waits for the device twice in a step.

    The host learns the gradient norm anyway, and it is finite if the whole gradient is. With sharded weights
    it is also the same on all workers: they skip the same steps.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._good_steps = 0
        self._norm = math.nan

    def scale(self, loss: Tensor) -> Tensor:
        """See ``LossScale``."""
        return loss * self.value

    def unscale(self, optimizer: Optimizer) -> None:
        """The scale is a power of two: exact."""
        gradients = [
            weight.grad
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.value)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - one kernel

    def note_norm(self, norm: float) -> None:
        """The host has waited for it."""
        self._norm = norm

    def step(self, optimizer: Optimizer) -> bool:
        """See ``LossScale``."""
        is_finite, self._norm = math.isfinite(self._norm), math.nan
        if is_finite:
            optimizer.step()
            self._good_steps += 1
        else:
            self.skips += 1
            self.set(self.value * self._scaler.get_backoff_factor())
        if self._good_steps == self._scaler.get_growth_interval():
            self.set(self.value * self._scaler.get_growth_factor())
        return is_finite

    def set(self, value: float) -> None:
        """See ``LossScale``."""
        self.value = min(max(value, SMALLEST), LARGEST)
        self._good_steps = 0

    def skip(self) -> None:
        """Nothing to reset."""

    def state(self) -> dict[str, Any]:
        """As torch's scaler: the device may change."""
        counted = {"scale": self.value, "_growth_tracker": self._good_steps}
        return {**super().state(), **counted}

    def restore(self, state: dict[str, Any]) -> None:
        """See ``LossScale``."""
        super().restore(state)
        self.value, self._good_steps = state["scale"], state["_growth_tracker"]


def make_loss_scale(device: torch.device) -> LossScale:
    """The loss scale of a device."""
    return DeviceLossScale(device) if is_accelerator(device) else LossScale(device)


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


LONGEST_WAIT = 128
"""Longest interval between probes, in steps."""
_PATIENCE = 3
"""Healthy probes before a module returns to low precision; doubles with each promotion."""
_CAUGHT_PATIENCE = 12
"""The same for a module that overflowed: it may do so inside, where probes do not reach."""
_RATIO = 0.1
"""Relative update size that counts as harmful after a loss spike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """One module moved between low and full precision."""

    module: str
    to: Literal["low", "full"]
    reason: str
    low_share: float
    """Share of the candidate parameters in low precision, after the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FullPrecision:
    """Why a module is in full precision, and its healthy probes since."""

    reason: str
    patience: int
    healthy: int = 0


class Adaptive:
    """Probes the value ranges of a model and decides which modules stay in low precision."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._form, self._dtype, self._device = FloatFormat.of(name, dtype), dtype, device
        self._models: tuple[nn.Module, ...] = ()
        self._candidates: dict[str, nn.Module] = {}
        self._sizes: dict[str, int] = {}
        self._full: dict[str, _FullPrecision] = {}
        self._promotions: dict[str, int] = {}
        # The first step is probed: unfit modules are known before they do harm.
        self._next: Literal["range", "finite", "none"] = "range"
        self._next_at, self._wait = 0, 1
        self._spikes, self._has_spiked = SpikeDetector(), False
        self._probe: RangeProbe | FiniteProbe | None = None

    def attach(self, model: nn.Module, *copies: nn.Module) -> None:
        """Attach to a model; the same modules of its copies move with it."""
        self.detach()
        self._models = (model, *copies)
        self._candidates = find_candidates(model)
        self._sizes = {
            name: sum(weight.numel() for weight in module.parameters())
            for name, module in self._candidates.items()
        }
        for name in self._full:
            self._move(name, "full")

    def detach(self) -> None:
        """Restore the models to low precision."""
        for name in self._full:
            self._move(name, "low")
        self._models, self._candidates, self._sizes = (), {}, {}

    @property
    def low_share(self) -> float:
        """Share of the candidates' parameters that are in low precision."""
        total = sum(self._sizes.values())
        low = sum(size for name, size in self._sizes.items() if not is_covered(name, self._full))
        return low / total if total else 1.0

    @property
    def is_due(self) -> bool:
        """Whether the current step is to be probed."""
        return self._next != "none" and bool(self._models)

    @contextmanager
    def probe(self) -> Generator[None]:
        """Context of the forward pass of a probed step."""
        if self._probe is None:
            probed_modules = self._candidates | {
                name: self._models[0].get_submodule(name) for name in self._full
            }
            is_range = self._next == "range"
            self._probe = (
                RangeProbe(probed_modules)
                if is_range
                else FiniteProbe(self._models[0], self._candidates)
            )
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # hooks must run in compiled models too
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            dtype = self._dtype if isinstance(self._probe, FiniteProbe) else self._wide()
            if dtype is not None:
                stack.enter_context(torch.autocast(self._device.type, dtype=dtype))
            stack.enter_context(self._probe.hooks())
            yield

    def before_update(self) -> None:
        """Called just before the optimiser's step."""
        if isinstance(self._probe, RangeProbe):
            self._probe.before_update()

    def observe(
        self, *, step: int, loss: float, applied: bool, seen_at: float, scale: LossScale | None
    ) -> list[PrecisionChange]:
        """Process a finished step; returns the changes.

        ``seen_at``: loss scale during the step; ``scale``: for the next one.
        """
        probe, self._probe = self._probe, None
        spiked = self._spikes.add(loss) if applied else False
        broken = not applied or not math.isfinite(loss)
        changes: list[PrecisionChange] = []
        if isinstance(probe, FiniteProbe):
            changes = self._promote_culprits(probe.read_culprits())
        elif isinstance(probe, RangeProbe):
            changes = self._apply_advice(probe, seen_at, scale)
        self._plan_next(step, probe, moved=bool(changes), broken=broken, spiked=spiked)
        return changes

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "full": {name: asdict(module) for name, module in self._full.items()},
            "promotions": dict(self._promotions),
            "next": [self._next, self._next_at, self._wait],
            "spikes": self._spikes.state(),
            "has_spiked": self._has_spiked,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name in self._full:
            self._move(name, "low")
        self._full = {name: _FullPrecision(**fields) for name, fields in state["full"].items()}
        for name in self._full:
            self._move(name, "full")
        self._promotions = dict(state["promotions"])
        self._next, self._next_at, self._wait = state["next"]
        self._spikes.restore(state["spikes"])
        self._has_spiked = state["has_spiked"]
        if isinstance(self._probe, RangeProbe):  # of an abandoned step
            self._probe.close()
        self._probe = None

    def _wide(self) -> torch.dtype | None:
        """The cheapest precision with the range of FP32; None for FP32 itself."""
        has_bf16 = is_accelerator(self._device) and kind_of(self._device.type).has_bf16(
            self._device.index or 0
        )
        return torch.bfloat16 if has_bf16 or self._dtype == torch.bfloat16 else None

    def _promote_culprits(self, culprits: list[str]) -> list[PrecisionChange]:
        changes: list[PrecisionChange] = []
        for name in culprits:
            movable = self._movable_around(name)
            if movable is not None and not is_covered(movable, self._full):
                reason = f"outputs overflow in {self._form.name}"
                changes.append(self._to_full(movable, reason, patience=_CAUGHT_PATIENCE))
        return changes

    def _movable_around(self, name: str) -> str | None:
        """The module, or its nearest parent that can be moved."""
        while not is_movable(self._models[0].get_submodule(name)):
            if name in self._full or not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def _apply_advice(
        self, probe: RangeProbe, seen_at: float, scale: LossScale | None
    ) -> list[PrecisionChange]:
        sizes = {
            name: size
            for name, size in self._sizes.items()
            if name in self._full or not is_covered(name, self._full)
        }
        power = round(math.log2(seen_at))
        advice = judge(
            probe.read_ranges(), sizes, self._form, power=power, scales=scale is not None
        )
        if scale is not None and advice.power != power:
            scale.set(2.0**advice.power)
        unfit = dict(advice.unfit)
        if self._has_spiked:
            for name, ratio in probe.read_ratios().items():
                if ratio > _RATIO and name not in unfit:
                    unfit[name] = f"its update was {ratio:.0%} of its weights after a loss spike"
            self._has_spiked = False
        changes = [
            self._to_full(name, reason)
            for name, reason in unfit.items()
            if not is_covered(name, self._full) and self._movable_around(name) == name
        ]
        promoted = {change.module for change in changes}
        for name in [name for name in self._full if name not in promoted]:
            changes += self._reconsider(name, unfit=name in unfit, judged=name in advice.judged)
        return changes

    def _reconsider(self, name: str, *, unfit: bool, judged: bool) -> list[PrecisionChange]:
        module = self._full[name]
        if unfit or not judged:
            self._full[name] = replace(module, healthy=0)
            return []
        self._full[name] = replace(module, healthy=module.healthy + 1)
        if module.healthy + 1 < module.patience:
            return []
        del self._full[name]
        self._move(name, "low")
        reason = f"fits {self._form.name} in {module.patience} probes"
        return [PrecisionChange(module=name, to="low", reason=reason, low_share=self.low_share)]

    def _to_full(self, name: str, reason: str, *, patience: int = _PATIENCE) -> PrecisionChange:
        times = self._promotions.get(name, 0)
        self._promotions[name] = times + 1
        self._full[name] = _FullPrecision(reason=reason, patience=patience * 2 ** min(times, 10))
        self._move(name, "full")
        return PrecisionChange(module=name, to="full", reason=reason, low_share=self.low_share)

    def _move(self, name: str, to: Literal["low", "full"]) -> None:
        for model in self._models:
            (run_in_full if to == "full" else run_as_given)(model.get_submodule(name))

    def _plan_next(
        self,
        step: int,
        probe: RangeProbe | FiniteProbe | None,
        *,
        moved: bool,
        broken: bool,
        spiked: bool,
    ) -> None:
        if isinstance(probe, RangeProbe):
            self._wait = 1 if moved else min(2 * self._wait, LONGEST_WAIT)
            self._next_at = step + self._wait
        self._has_spiked |= spiked
        was_finite_probe = isinstance(probe, FiniteProbe)
        if broken and (moved or not was_finite_probe):
            # An overflow: of the forward pass, where the probe finds its module, or of the loss
            # scale, which has been halved already.
            self._next = "finite"
        elif was_finite_probe or spiked or step + 1 >= self._next_at:
            self._next = "range"
        else:
            self._next = "none"
