"""Policies for pools with several device types, with their prior knowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.lab.simulation.policies import SimulatedPolicy
from yunlu.lab.simulation.sia_estimator import SiaEstimator
from yunlu.lab.simulation.sia_policy import SiaPolicy
from yunlu.lab.simulation.sia_rules import BELIEVED_RESTART_S, load_prior
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from yunlu.hardware.fleet import Node

TYPE_AWARE = ("yunlu", "yunlu-blind", "sia")
"""Policies that distinguish device types; others treat all devices as equal."""


def make_type_aware_policy(
    name: str,
    profiles: Path,
    applications: Iterable[str],
    nodes: Sequence[Node],
    slowdown: Mapping[str, float] | None = None,
) -> SimulatedPolicy:
    """One of ``TYPE_AWARE``, for a pool of these nodes and the profiles in a directory."""
    sizes = {node.type: node.devices for node in nodes}
    types = tuple(sizes)
    prior = load_prior(profiles, applications, types, slowdown)
    if name == "sia":
        return SimulatedPolicy(
            name=name,
            policy=SiaPolicy(restart_s_by_program=BELIEVED_RESTART_S),
            estimator=SiaEstimator(prior=prior, node_devices=sizes),
            declares_length=False,
        )
    is_blind = name == "yunlu-blind"
    return SimulatedPolicy(
        name=name,
        policy=Allocator(AllocatorOptions(learns_from_programs=not is_blind)),
        estimator=CrossTypeFitter(types=types, prior=prior),
        is_shared=not is_blind,
        declares_length=not is_blind,
    )
