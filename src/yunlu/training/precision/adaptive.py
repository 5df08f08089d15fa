"""Modules move to full precision while they need it, and back: who, when, and why.

Every few steps, and in the steps after trouble, a step is looked at. The looks come at growing
distances while nothing changes, so that a healthy run pays for them with a percent at most.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from yunlu.training.precision.modules import (
    find_candidates,
    is_covered,
    is_movable,
    run_as_given,
    run_in_full,
)
from yunlu.training.precision.policy import judge
from yunlu.training.precision.range_probes import FiniteProbe, RangeProbe
from yunlu.training.precision.ranges import FloatFormat
from yunlu.training.precision.spikes import SpikeDetector

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from yunlu.training.precision.loss_scale import LossScale

LONGEST_WAIT = 128
"""Steps between two looks when all is well."""
_PATIENCE = 3
"""Healthy looks before a module is tried in low precision again; doubles each time it comes back."""
_CAUGHT_PATIENCE = 12
"""The same for a module that did overflow: it may do so inside, where no look at its ends reaches."""
_RATIO = 0.1
"""An update this large, as a share of the weights, after a spike of the loss: torn weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """One module moved between low and full precision."""

    module: str
    to: Literal["low", "full"]
    reason: str
    low_share: float
    """Share of the parameters that could be low and are, after the move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Full:
    """Why a module is in full precision, and how long it has been well."""

    reason: str
    patience: int
    healthy: int = 0


class Adaptive:
    """Watches the numbers of a model in low precision and decides who may stay there."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._form, self._dtype, self._device = FloatFormat.of(name, dtype), dtype, device
        self._models: tuple[nn.Module, ...] = ()
        self._candidates: dict[str, nn.Module] = {}
        self._sizes: dict[str, int] = {}
        self._full: dict[str, _Full] = {}
        self._promotions: dict[str, int] = {}
        # The first step is looked at: what cannot be low is known before it does harm.
        self._next: Literal["range", "finite", "none"] = "range"
        self._next_at, self._wait = 0, 1
        self._spikes, self._has_spiked = SpikeDetector(), False
        self._look: RangeProbe | FiniteProbe | None = None

    def attach(self, model: nn.Module, *copies: nn.Module) -> None:
        """Watch a model; the same modules of its copies move with it."""
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
        """Leave the models as they were found."""
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
        """Whether the step under way is to be looked at."""
        return self._next != "none" and bool(self._models)

    @contextmanager
    def look(self) -> Generator[None]:
        """The forward pass of a step that is looked at."""
        if self._look is None:
            watched = self._candidates | {
                name: self._models[0].get_submodule(name) for name in self._full
            }
            is_range = self._next == "range"
            self._look = (
                RangeProbe(watched) if is_range else FiniteProbe(self._models[0], self._candidates)
            )
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # compiled or not, hooks must be seen
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            dtype = self._dtype if isinstance(self._look, FiniteProbe) else self._wide()
            if dtype is not None:
                stack.enter_context(torch.autocast(self._device.type, dtype=dtype))
            stack.enter_context(self._look.watching())
            yield

    def before_update(self) -> None:
        """Just before the optimiser's step."""
        if isinstance(self._look, RangeProbe):
            self._look.before_update()

    def observe(
        self, *, step: int, loss: float, applied: bool, seen_at: float, scale: LossScale | None
    ) -> list[PrecisionChange]:
        """Take a finished step; returns what was moved.

        ``seen_at`` is the loss scale during the step, ``scale`` the one for the next.
        """
        look, self._look = self._look, None
        spiked = self._spikes.add(loss) if applied else False
        broken = not applied or not math.isfinite(loss)
        moves: list[PrecisionChange] = []
        if isinstance(look, FiniteProbe):
            moves = self._promote_culprits(look.read_culprits())
        elif isinstance(look, RangeProbe):
            moves = self._weigh(look, seen_at, scale)
        self._plan_next(step, look, moved=bool(moves), broken=broken, spiked=spiked)
        return moves

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "full": {name: asdict(kept) for name, kept in self._full.items()},
            "promotions": dict(self._promotions),
            "next": [self._next, self._next_at, self._wait],
            "spikes": self._spikes.state(),
            "has_spiked": self._has_spiked,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name in self._full:
            self._move(name, "low")
        self._full = {name: _Full(**kept) for name, kept in state["full"].items()}
        for name in self._full:
            self._move(name, "full")
        self._promotions = dict(state["promotions"])
        self._next, self._next_at, self._wait = state["next"]
        self._spikes.restore(state["spikes"])
        self._has_spiked = state["has_spiked"]
        if isinstance(self._look, RangeProbe):  # of a step that is given up
            self._look.close()
        self._look = None

    def _wide(self) -> torch.dtype | None:
        """The cheapest precision with the range of FP32; none is FP32 itself."""
        has_bf16 = self._device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.bfloat16 if has_bf16 or self._dtype == torch.bfloat16 else None

    def _promote_culprits(self, culprits: list[str]) -> list[PrecisionChange]:
        moves: list[PrecisionChange] = []
        for name in culprits:
            movable = self._movable_around(name)
            if movable is not None and not is_covered(movable, self._full):
                reason = f"outputs overflow in {self._form.name}"
                moves.append(self._to_full(movable, reason, patience=_CAUGHT_PATIENCE))
        return moves

    def _movable_around(self, name: str) -> str | None:
        """The module, or the nearest around it that can be moved."""
        while not is_movable(self._models[0].get_submodule(name)):
            if name in self._full or not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def _weigh(
        self, look: RangeProbe, seen_at: float, scale: LossScale | None
    ) -> list[PrecisionChange]:
        sizes = {
            name: size
            for name, size in self._sizes.items()
            if name in self._full or not is_covered(name, self._full)
        }
        power = round(math.log2(seen_at))
        verdict = judge(
            look.read_ranges(), sizes, self._form, power=power, scales=scale is not None
        )
        if scale is not None and verdict.power != power:
            scale.set(2.0**verdict.power)
        unfit = dict(verdict.unfit)
        if self._has_spiked:
            for name, ratio in look.read_ratios().items():
                if ratio > _RATIO and name not in unfit:
                    unfit[name] = f"its update was {ratio:.0%} of its weights after a loss spike"
            self._has_spiked = False
        moves = [
            self._to_full(name, reason)
            for name, reason in unfit.items()
            if not is_covered(name, self._full) and self._movable_around(name) == name
        ]
        fresh = {move.module for move in moves}
        for name in [name for name in self._full if name not in fresh]:
            moves += self._reconsider(name, unfit=name in unfit, judged=name in verdict.judged)
        return moves

    def _reconsider(self, name: str, *, unfit: bool, judged: bool) -> list[PrecisionChange]:
        kept = self._full[name]
        if unfit or not judged:
            self._full[name] = replace(kept, healthy=0)
            return []
        self._full[name] = replace(kept, healthy=kept.healthy + 1)
        if kept.healthy + 1 < kept.patience:
            return []
        del self._full[name]
        self._move(name, "low")
        reason = f"fits {self._form.name} in {kept.patience} looks"
        return [PrecisionChange(module=name, to="low", reason=reason, low_share=self.low_share)]

    def _to_full(self, name: str, reason: str, *, patience: int = _PATIENCE) -> PrecisionChange:
        times = self._promotions.get(name, 0)
        self._promotions[name] = times + 1
        self._full[name] = _Full(reason=reason, patience=patience * 2 ** min(times, 10))
        self._move(name, "full")
        return PrecisionChange(module=name, to="full", reason=reason, low_share=self.low_share)

    def _move(self, name: str, to: Literal["low", "full"]) -> None:
        for model in self._models:
            (run_in_full if to == "full" else run_as_given)(model.get_submodule(name))

    def _plan_next(
        self,
        step: int,
        look: RangeProbe | FiniteProbe | None,
        *,
        moved: bool,
        broken: bool,
        spiked: bool,
    ) -> None:
        if isinstance(look, RangeProbe):
            self._wait = 1 if moved else min(2 * self._wait, LONGEST_WAIT)
            self._next_at = step + self._wait
        self._has_spiked |= spiked
        was_finite_look = isinstance(look, FiniteProbe)
        if broken and (moved or not was_finite_look):
            # An overflow: of the forward pass, which names its culprit, or of the loss scale,
            # which has been halved and needs nobody.
            self._next = "finite"
        elif was_finite_look or spiked or step + 1 >= self._next_at:
            self._next = "range"
        else:
            self._next = "none"
