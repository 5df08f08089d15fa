"""Step time on this machine, from operator counts and the machine profile. Pure.

Models that a processor trains are small: calls cost as much as arithmetic, products are far below the
peak and most of the rest is memory. So time is the sum over operators, each of its kind and size, rather
than FLOPs over a reachable peak (Williams et al. 2009 for the roofline, here with measured curves).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.machine_profile import KernelTiming, Kind, MachineProfile
    from yunlu.planning.plan import Kernel

_COMPUTED: frozenset[Kind] = frozenset(("product", "convolution", "convolution_back", "attention"))
"""Kinds that are sized by FLOPs."""
_NEXT_BEST: dict[Kind, Kind] = {"convolution_back": "convolution", "attention": "product"}
"""What stands for a kind that was not measured; sums do for what only moves, products for the rest."""
_PASS_CALLS = 25
"""Python around the operators of a pass, in calls of one: the task, the loss, the batch."""
_STEP_CALLS = 15
"""Operators and calls of the engine's own in a step, whatever the model: counts, loss to the host, the
log. What grows with the model (the norm, clearing gradients) is one call more a trained tensor."""
_UPDATE_CALLS = 12
"""Operators that make up Adam where no kernel has them all."""
_UPDATE_PASSES = 2.5
"""How often they read and write what one kernel does once."""
_SAMPLE_CALLS = 0.5
"""Python that each sample costs on its way into a batch, in calls of an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Alike operators of a pass: how many, and the size of each."""

    kind: Kind
    calls: int
    size: float
    """FLOPs of a product or convolution, else bytes read and written; 0 only makes a view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward and backward of one micro-batch, counted rather than timed."""

    samples: int
    operators: tuple[Operators, ...]

    @property
    def flops(self) -> float:
        """Of products, convolutions and attention."""
        return sum(
            operator.calls * operator.size
            for operator in self.operators
            if operator.kind in _COMPUTED
        )

    @property
    def calls(self) -> int:
        """All operators, views too."""
        return sum(operator.calls for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """A step of a job, counted."""

    passed: Pass
    update: Operators
    """The optimiser's step."""
    gradient_bytes: float
    trained_tensors: int


def pass_s(passed: Pass, probed: MachineProfile, *, threads: int, precision: str = "fp32") -> float:
    """Seconds of a model's pass, the task around it included."""
    own_s = _PASS_CALLS * probed.call_s
    return own_s + operators_s(passed.operators, probed, threads=threads, precision=precision)


def operators_s(
    operators: Sequence[Operators], probed: MachineProfile, *, threads: int, precision: str = "fp32"
) -> float:
    """Seconds of the operators alone."""
    calls_s, worked_s = 0.0, 0.0
    kinds: set[Kind] = {operator.kind for operator in operators}
    for kind in kinds:
        result = _pace_of(probed, kind, threads=threads, precision=precision)
        if result is None:
            continue
        alike = [operator for operator in operators if operator.kind == kind]
        calls = np.array([item.calls for item in alike], dtype=np.float64)
        sizes = np.array([item.size for item in alike])
        # A pace has the bare call in it; what autograd and modules add to one is another figure.
        beyond_s = np.where(sizes > 0, result.seconds_at(sizes) - result.call_s, 0.0)
        slower = probed.mixed_convolutions if "convolution" in kind else probed.mixed
        calls_s += float(calls.sum()) * probed.call_s
        worked_s += slower * float(calls @ np.maximum(beyond_s, 0.0))
    if probed.kind == "cpu":
        return calls_s + worked_s
    return max(calls_s, worked_s)  # an accelerator works while the next calls are made


def _pace_of(
    probed: MachineProfile, kind: Kind, *, threads: int, precision: str
) -> KernelTiming | None:
    """What is measured in the precision, else in FP32: all but products mostly stay in it anyway."""
    instead: Kind = "product" if kind in _COMPUTED else "stream"
    for name in (kind, _NEXT_BEST.get(kind, instead), instead):
        for wanted in (precision, "fp32"):
            result = probed.pace(name, threads=threads, precision=wanted)
            if result is not None:
                return result
    return None


def own_s(work: OperatorWork, probed: MachineProfile, *, threads: int) -> float:
    """What the engine does in a step besides passes and update: the gradient's norm, calls, the log."""
    norm = Operators(kind="stream", calls=1, size=work.gradient_bytes)
    calls_s = (_STEP_CALLS + work.trained_tensors) * probed.call_s
    return calls_s + operators_s((norm,), probed, threads=threads)


def update_s(work: OperatorWork, probed: MachineProfile, *, threads: int) -> float:
    """The optimiser's step."""
    return operators_s((work.update,), probed, threads=threads)


def per_sample_s(probed: MachineProfile) -> float:
    """What fetching a sample costs, as far as nobody has seen one: Python, no decoding."""
    return _SAMPLE_CALLS * probed.call_s


def update_operators(
    kernel: Kernel, *, gradient_bytes: float, state_bytes: float, tensors: int
) -> Operators:
    """The optimiser's step: the gradient is read; weights and what it remembers, read and written."""
    calls = {"fused": 1, "foreach": _UPDATE_CALLS, "single": _UPDATE_CALLS * tensors}[kernel]
    moved = 3 * gradient_bytes + 2 * state_bytes
    passes = 1 if kernel == "fused" else _UPDATE_PASSES
    return Operators(kind="update", calls=calls, size=passes * moved / calls)


def enlarge(operators: Sequence[Operators], ratio: float) -> tuple[Operators, ...]:
    """Those of more samples than were counted: as many operators, each as much larger.

    What depends on the weights alone would stay; of what takes time that is little.
    """
    return tuple(replace(operator, size=operator.size * ratio) for operator in operators)
