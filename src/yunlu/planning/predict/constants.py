"""Constants of the step-time model: shared ones, and deviations by stack. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.planning.predict.query_batch import Column

STACKS = (
    "unknown",
    "yunlu",
    "megatron-deepspeed",
    "llm-foundry",
    "megatron-bridge",
    "torchtitan",
    "fms-fsdp",
    "transformers",
    "mindspeed",
    "nanotron",
    "maxtext",
    "neuron",
    "unknown-flash-1",
    "unknown-scores",
    "unknown-norms",
    "unknown-flash-1-norms",
    "unknown-scores-norms",
)
"""Software stacks. The unknown have the shared constants: with FlashAttention 2, with
FlashAttention 1, without any; with norms as one kernel, and as separate operators."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What a constant is before any measurement: log-normal about ``value``."""

    value: float
    spread: float
    """Of the shared constant about ``value``, in logs."""
    stack_spread: float = 0.0
    """Of a stack's departure from the shared constant, in logs; 0: no stack departs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTraits:
    """What is known of a stack from its documentation, before any measurement of it."""

    scores_in_memory: bool = False
    """Attention writes its scores to memory: no flash kernel."""
    first_flash: bool = False
    """The first FlashAttention: 25-40 % of an A100's peak where the second has 50-73 % (Dao 2023)."""
    tuned_attention: bool = False
    """Kernels of attention written for the device itself: cuDNN's, FlashAttention-3, Splash."""
    eager: bool = False
    """Operators run one by one, neither compiled nor written as one kernel."""
    hides_gradients: bool = True
    """Gradients are reduced in buckets while the backward pass still runs."""
    written_norms: bool = False
    """Norms are written out in operators, each of which reads and writes memory."""
    selects_products: bool = False
    """Selective recomputation repeats every second matrix product, not attention."""


TRAITS = {
    "yunlu": StackTraits(eager=True),  # compiled only where start-up finds that it pays
    "megatron-deepspeed": StackTraits(scores_in_memory=True, hides_gradients=False),
    "llm-foundry": StackTraits(first_flash=True, eager=True),
    "megatron-bridge": StackTraits(tuned_attention=True),
    "maxtext": StackTraits(tuned_attention=True),
    "torchtitan": StackTraits(selects_products=True),
    "transformers": StackTraits(eager=True, written_norms=True),
    "mindspeed": StackTraits(eager=True, hides_gradients=False),
    "nanotron": StackTraits(eager=True, hides_gradients=False),
    "neuron": StackTraits(scores_in_memory=True),
    # Predicted as if nothing were known of them, the stacks that were measured err least this way.
    "unknown": StackTraits(eager=True),
    "unknown-flash-1": StackTraits(eager=True, first_flash=True),
    "unknown-scores": StackTraits(eager=True, scores_in_memory=True),
    "unknown-norms": StackTraits(eager=True, written_norms=True),
    "unknown-flash-1-norms": StackTraits(eager=True, first_flash=True, written_norms=True),
    "unknown-scores-norms": StackTraits(eager=True, scores_in_memory=True, written_norms=True),
}
"""By stack; those not named have the best of today."""

PRIORS: dict[str, Prior] = {
    # Matrix products take FLOP / peak / share * (1 + tokens / T + ways * W / hidden + tiles).
    "gemm_share": Prior(0.87, 0.06, 0.12),
    "unmeasured_share": Prior(0.72, 0.15),
    "gemm_tokens": Prior(80.0, 0.6),
    "gemm_width": Prior(60.0, 0.6),
    "gemm_tiles": Prior(2e5, 0.6),
    "fp8_share": Prior(0.85, 0.1, 0.05),
    "fp4_share": Prior(0.65, 0.15),
    "attention_share": Prior(0.5, 0.25, 0.25),
    "attention_power": Prior(0.4, 0.2, 0.3),
    "score_passes": Prior(8.0, 0.6, 0.4),
    "plain_bytes": Prior(10.0, 0.4),
    "cut_bytes": Prior(70.0, 0.3, 0.4),
    "logit_bytes": Prior(24.0, 0.3, 0.3),
    "eager_bytes": Prior(1.4, 0.3),
    # Bytes a unit of width of two norms of nine operators each, counted; no timed row has them.
    "written_norms": Prior(240.0, 0.2),
    "first_flash": Prior(0.53, 0.15),
    "tuned_power": Prior(0.4, 0.4),
    "selective_products": Prior(0.5, 0.05),
    "unhidden": Prior(1.5, 0.2),
    "launch_s": Prior(1e-3, 0.2, 0.5),
    "micro_s": Prior(1e-3, 0.6, 0.8),
    # Messages: seconds = latency + bytes / (bandwidth * share).
    "link_share": Prior(0.73, 0.06, 0.12),
    "link_latency_s": Prior(20e-6, 0.2, 0.3),
    "network_share": Prior(0.65, 0.2, 0.4),
    "network_latency_s": Prior(30e-6, 0.4, 0.3),
    "wide_tensor_s": Prior(1e-4, 0.5, 3.0),
    "crowding": Prior(2.0, 0.6, 0.6),
    "tensor_exposed": Prior(0.85, 0.2, 0.3),
    "pipe_exposed": Prior(0.6, 0.4, 0.3),
    "data_exposed": Prior(0.6, 0.4, 0.4),
    "sharded_volume": Prior(1.0, 0.1, 0.15),
    "context_exposed": Prior(0.4, 0.5),
    "stall_s": Prior(1e-3, 0.5, 3.0),
    "imbalance": Prior(0.6, 0.4, 0.5),
    # Where tokens choose experts: fitted apart, on models that have some.
    "expert_share": Prior(0.7, 0.3),
    "expert_launches": Prior(3.0, 0.5),
    "exchange_exposed": Prior(0.5, 0.3),
    "route_passes": Prior(8.0, 0.6),
    "bubble": Prior(1.0, 0.1, 0.15),
    "optimizer_bytes": Prior(30.0, 0.3, 0.3),
    "step_s": Prior(5e-3, 0.8, 0.8),
    "straggling": Prior(0.01, 0.6, 0.5),
}
"""Every constant of the model. What each stands for: docs/planner-model.md."""

NAMES = tuple(PRIORS)
OF_EXPERTS = ("expert_share", "expert_launches", "exchange_exposed", "route_passes")
"""Constants that no dense model has a use for."""


@dataclass(frozen=True, slots=True)
class Constants:
    """``values[stack, constant]``: what holds for each stack, all departures taken in."""

    values: np.ndarray[Any, np.dtype[np.float64]]

    def columns(self, stack: Column) -> dict[str, Any]:
        """Each constant by name: one number where all points have one stack, else a column."""
        index = stack.astype(np.intp)
        if len(index) == 0 or (index == index[0]).all():
            row = self.values[index[0] if len(index) else 0]
            return {name: float(value) for name, value in zip(NAMES, row, strict=True)}
        return {name: self.values[:, k][index] for k, name in enumerate(NAMES)}


def make_constants(
    shared: Mapping[str, float], departures: Mapping[str, Mapping[str, float]]
) -> Constants:
    """From shared values and the logs by which stacks depart from them."""
    base = np.log([shared.get(name, PRIORS[name].value) for name in NAMES])
    logs = np.tile(base, (len(STACKS), 1))
    for stack, entries in departures.items():
        for name, value in entries.items():
            logs[STACKS.index(stack), NAMES.index(name)] += value
    return from_logs(logs)


def from_logs(logs: np.ndarray[Any, np.dtype[np.float64]]) -> Constants:
    """From ``[stack, constant]`` logarithms; what a stack's traits exclude has no effect."""
    values = np.exp(logs)
    for name, (has_it, without) in _OF_TRAIT.items():
        values[~has_it, NAMES.index(name)] = without
    return Constants(values)


def _which(trait: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([getattr(TRAITS.get(stack, StackTraits()), trait) for stack in STACKS])


_OF_TRAIT = {
    "score_passes": (_which("scores_in_memory"), 0.0),
    "first_flash": (_which("first_flash"), 1.0),
    "tuned_power": (_which("tuned_attention"), 1.0),
    "eager_bytes": (_which("eager"), 1.0),
    "written_norms": (_which("written_norms"), 0.0),
    "unhidden": (~_which("hides_gradients"), 1.0),
    "selective_products": (_which("selects_products"), 0.0),
}
"""Constants that only stacks of a trait have, and what they are elsewhere."""


@cache
def shipped() -> dict[str, Any]:
    """What ``benchmarks/planner.py fit`` wrote: constants, correction, spread of the residuals."""
    text = resources.files("yunlu.planning.data").joinpath("constants.json").read_text("utf-8")
    return json.loads(text)


@cache
def shipped_constants() -> Constants:
    """The fitted constants that come with the package."""
    data = shipped()
    return make_constants(data["shared"], data["departures"])
