"""How the planner is judged: which rows are fitted and which predicted. Frozen before any tuning.

Each protocol yields folds ``(fit, test)``: masks over the evidence, disjoint. Rows of other sources
are always in ``fit``. No mask looks at what was measured, but for whether anything was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.planning.predict.constants import STACKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.planner_parts.evidence import Evidence

SCALE_SOURCES = ("llm_foundry", "nanotron_playbook", "megatron_bridge", "nemo", "torchtitan")
SCALE_DEVICES = 64
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Fold:
    """One fit and the rows it is judged on."""

    name: str
    fit: np.ndarray
    test: np.ndarray


def leave_model_out(evidence: Evidence, source: str) -> Iterator[Fold]:
    """LOMO: each model of the source in turn is predicted from everything else."""
    own = evidence.timed & (evidence.source == source)
    for model in sorted(set(evidence.model[own])):
        test = own & (evidence.model == model)
        yield Fold(f"{source}:{model}", evidence.timed & ~test, test)


def half_and_half(evidence: Evidence, source: str) -> Iterator[Fold]:
    """A random half of the source is predicted from the other half; three seeds."""
    own = evidence.timed & (evidence.source == source)
    for seed in SEEDS:
        chosen = np.random.default_rng(seed).random(len(evidence)) < 0.5
        yield Fold(f"{source}:half{seed}", evidence.timed & ~(own & chosen), own & chosen)


def cold_start(evidence: Evidence, source: str) -> Iterator[Fold]:
    """The source is predicted from other sources only."""
    own = evidence.timed & (evidence.source == source)
    yield Fold(f"{source}:cold", evidence.timed & ~own, own)


def leave_stack_out(evidence: Evidence) -> Iterator[Fold]:
    """All sources of one stack are predicted from other stacks, as if nothing were known of it."""
    for stack in sorted(set(evidence.points.stack[evidence.timed].astype(int))):
        own = evidence.timed & (evidence.points.stack == stack)
        yield Fold(STACKS[stack], evidence.timed & ~own, own)


def scale_out(evidence: Evidence, source: str) -> Iterator[Fold]:
    """Rows of the source beyond 64 devices are predicted from its smaller ones and other sources."""
    own = evidence.timed & (evidence.source == source)
    test = own & (evidence.points.devices > SCALE_DEVICES)
    yield Fold(f"{source}:scale", evidence.timed & ~test, test)


def leave_routed_model_out(evidence: Evidence, source: str) -> Iterator[Fold]:
    """Models with experts in turn; variants in brackets are one model. Dense rows are in no fold."""
    own = evidence.routed & (evidence.source == source)
    family = np.array([model.partition(" (")[0] for model in evidence.model])
    for model in sorted(set(family[own])):
        test = own & (family == model)
        yield Fold(f"{source}:{model}", evidence.routed & ~test, test)


def model_folds(evidence: Evidence, count: int = 5) -> Iterator[Fold]:
    """For intervals: models of every source dealt into five hands, each predicted from the others."""
    hand = np.full(len(evidence), -1)
    for source in dict.fromkeys(evidence.source):
        own = evidence.timed & (evidence.source == source)
        for place, model in enumerate(sorted(set(evidence.model[own]))):
            hand[own & (evidence.model == model)] = place % count
    for place in range(count):
        test = hand == place
        yield Fold(f"hand{place}", evidence.timed & ~test, test)
