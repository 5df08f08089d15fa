"""Step time: its composition from terms, and the terms of this machine by operator counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.machine_profile import KernelTiming, Kind, MachineProfile
    from yunlu.spec.optimizers import Kernel


_COMPUTED: frozenset[Kind] = frozenset(("product", "convolution", "convolution_back", "attention"))
"""Kinds sized by FLOPs."""
_NEXT_BEST: dict[Kind, Kind] = {"convolution_back": "convolution", "attention": "product"}
"""Substitute for a kind that was not measured: sums for data movement, products for the rest."""
_PASS_CALLS = 25
"""Python overhead of a pass, in operator calls: the task, the loss, the batch."""
_STEP_CALLS = 15
"""Operators and calls of the engine's own in a step, whatever the model: counts, loss to the host, the
log. What grows with the model (the norm, clearing gradients) is one call more a trained tensor."""
_UPDATE_CALLS = 12
"""Operators of Adam without a fused kernel."""
_UPDATE_PASSES = 2.5
"""Factor on memory traffic relative to a fused kernel."""
_SAMPLE_CALLS = 0.5
"""Python overhead per sample in collation, in operator calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Identical operators of a pass: number and size."""

    kind: Kind
    calls: int
    size: float
    """FLOPs of a product or convolution, else bytes read and written; 0 for views."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Counted operators of forward and backward of one micro-batch."""

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
        """All operators, including views."""
        return sum(operator.calls for operator in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """Counted operators of a step of a job."""

    passed: Pass
    update: Operators
    """The optimiser's step."""
    gradient_bytes: float
    trained_tensors: int


def pass_s(passed: Pass, probed: MachineProfile, *, threads: int, precision: str = "fp32") -> float:
    """Seconds of a model's pass, including the task."""
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
        # A timing includes the bare call; overhead of autograd and modules is separate.
        beyond_s = np.where(sizes > 0, result.seconds_at(sizes) - result.call_s, 0.0)
        slower = probed.mixed_convolutions if "convolution" in kind else probed.mixed
        calls_s += float(calls.sum()) * probed.call_s
        worked_s += slower * float(calls @ np.maximum(beyond_s, 0.0))
    if probed.kind == "cpu":
        return calls_s + worked_s
    return max(calls_s, worked_s)  # an accelerator computes while the next calls are made


def _pace_of(
    probed: MachineProfile, kind: Kind, *, threads: int, precision: str
) -> KernelTiming | None:
    """Timing in the precision, else in FP32: most operators except products stay in it."""
    instead: Kind = "product" if kind in _COMPUTED else "stream"
    for name in (kind, _NEXT_BEST.get(kind, instead), instead):
        for wanted in (precision, "fp32"):
            result = probed.pace(name, threads=threads, precision=wanted)
            if result is not None:
                return result
    return None


def own_s(work: OperatorWork, probed: MachineProfile, *, threads: int) -> float:
    """Engine overhead of a step besides passes and update: gradient norm, calls, log."""
    norm = Operators(kind="stream", calls=1, size=work.gradient_bytes)
    calls_s = (_STEP_CALLS + work.trained_tensors) * probed.call_s
    return calls_s + operators_s((norm,), probed, threads=threads)


def update_s(work: OperatorWork, probed: MachineProfile, *, threads: int) -> float:
    """The optimiser's step."""
    return operators_s((work.update,), probed, threads=threads)


def per_sample_s(probed: MachineProfile) -> float:
    """Cost of fetching a sample before any was seen: Python, no decoding."""
    return _SAMPLE_CALLS * probed.call_s


def update_operators(
    kernel: Kernel, *, gradient_bytes: float, state_bytes: float, tensors: int
) -> Operators:
    """Operators of the optimiser's step: reads the gradient; reads and writes weights and state."""
    calls = {"fused": 1, "foreach": _UPDATE_CALLS, "single": _UPDATE_CALLS * tensors}[kernel]
    moved = 3 * gradient_bytes + 2 * state_bytes
    passes = 1 if kernel == "fused" else _UPDATE_PASSES
    return Operators(kind="update", calls=calls, size=passes * moved / calls)


def enlarge(operators: Sequence[Operators], ratio: float) -> tuple[Operators, ...]:
    """The operators for more samples: as many, each larger.

    What depends on the weights alone would stay; of what takes time that is little.
    """
    return tuple(replace(operator, size=operator.size * ratio) for operator in operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, each a number or a column; the parts add up."""

    compute_s: Any
    tp_s: Any
    pp_bubble_s: Any
    dp_s: Any
    """Exposed part of data-parallel or sharded communication."""
    optimizer_s: Any
    input_s: Any
    other_s: Any

    @property
    def total_s(self) -> Any:
        """All parts."""
        return (
            self.compute_s
            + self.tp_s
            + self.pp_bubble_s
            + self.dp_s
            + self.optimizer_s
            + self.input_s
            + self.other_s
        )

    @property
    def parts(self) -> dict[str, Any]:
        """By component."""
        return {name: getattr(self, f"{name}_s") for name in STEP_PARTS}


STEP_PARTS = tuple(field.name.removesuffix("_s") for field in fields(StepTime))


def compose_step(
    *,
    micros: Any,
    own_s: Any,
    stage_s: Any,
    slowest_s: Any,
    pipe_s: Any = 0.0,
    waiting: Any = 0.0,
    data_s: Any = 0.0,
    optimizer_s: Any = 0.0,
    input_s: Any = 0.0,
    other_s: Any = 0.0,
) -> StepTime:
    """Micro-batches through the stages of a pipeline, then communication, update, input and the rest.

    Args:
        micros: Micro-batches of a replica.
        own_s: Compute of one micro-batch in a stage.
        stage_s: The same with its tensor-parallel messages.
        slowest_s: Of the stage that sets the pace.
        pipe_s: Messages of one micro-batch between stages.
        waiting: Passes of a stage that a device waits while the pipeline fills and drains:
            (pp - 1) / stages per device (Narayanan et al. 2021, section 2.2).
        data_s: Communication between replicas that nothing hides.
        optimizer_s: The update.
        input_s: Fetching of samples.
        other_s: Overhead of the engine.
    """
    busy_s, compute_s = micros * stage_s, micros * own_s
    return StepTime(
        compute_s=compute_s,
        tp_s=busy_s - compute_s,
        pp_bubble_s=micros * (slowest_s - stage_s + pipe_s) + waiting * (stage_s + pipe_s),
        dp_s=data_s,
        optimizer_s=optimizer_s,
        input_s=input_s,
        other_s=other_s,
    )
