"""Policies that can be simulated, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.lab.simulation.sia import BELIEVED_RESTART_S, SiaEstimator, SiaPolicy, load_prior
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter
from yunlu.spec.entry_points import POLICIES, known_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from yunlu.hardware.fleet import Node
    from yunlu.lab.simulation.simulator import SimulationRules
    from yunlu.scheduler.policy.goodput import Estimator
    from yunlu.scheduler.policy.values import Policy


BLIND = "yunlu-blind"
"""Knows what Pollux knows: no lengths, and nothing of other jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """A new policy with everything it needs."""

    name: str
    policy: Policy
    estimator: Estimator | None = None
    """None: jobs keep the batch they ask for, and the policy sees their true speed."""
    is_shared: bool = False
    """Whether jobs of one application learn from each other."""
    declares_length: bool = True

    def adapt_rules(self, rules: SimulationRules) -> SimulationRules:
        """The simulation rules as this policy needs them."""
        return replace(
            rules,
            is_shared=self.is_shared,
            declares_length=rules.declares_length and self.declares_length,
        )


def make_policy(name: str) -> SimulatedPolicy:
    """A policy by name, or a user's ``module:Class``; its attribute ``estimator`` learns speeds."""
    if name == "yunlu":
        return SimulatedPolicy(name=name, policy=Allocator(), estimator=Fitter(), is_shared=True)
    if name == BLIND:
        return SimulatedPolicy(
            name=name,
            policy=Allocator(AllocatorOptions(learns_from_programs=False)),
            estimator=Fitter(),
            declares_length=False,
        )
    policy = open_policy(name)
    estimator: Estimator | None = getattr(policy, "estimator", None)
    return SimulatedPolicy(
        name=getattr(policy, "name", name),
        policy=policy,
        estimator=estimator,
        is_shared=bool(getattr(policy, "is_shared", False)),
    )


def policy_names() -> tuple[str, ...]:
    """Policies that can be simulated, besides a user's own."""
    return (*known_names(POLICIES), BLIND)


TYPE_AWARE = ("yunlu", BLIND, "sia")
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
    is_blind = name == BLIND
    return SimulatedPolicy(
        name=name,
        policy=Allocator(AllocatorOptions(learns_from_programs=not is_blind)),
        estimator=CrossTypeFitter(types=types, prior=prior),
        is_shared=not is_blind,
        declares_length=not is_blind,
    )
