"""Policies that can be simulated, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.core.errors import did_you_mean
from yunlu.core.imports import make_object, names_object
from yunlu.lab.simulation.tables import SimulationError
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.baselines import BASELINES
from yunlu.scheduler.policy.fitting import Fitter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.lab.simulation.rules import SimulationRules
    from yunlu.scheduler.policy.observations import Estimator
    from yunlu.scheduler.policy.values import Policy


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


def _make_baseline(name: str) -> Callable[[], SimulatedPolicy]:
    return lambda: SimulatedPolicy(name=name, policy=BASELINES[name]())


def _make_own() -> SimulatedPolicy:
    return SimulatedPolicy(name="yunlu", policy=Allocator(), estimator=Fitter(), is_shared=True)


def _make_own_blind() -> SimulatedPolicy:
    options = AllocatorOptions(learns_from_programs=False)
    return SimulatedPolicy(
        name="yunlu-blind",
        policy=Allocator(options),
        estimator=Fitter(),
        declares_length=False,
    )


POLICIES: Mapping[str, Callable[[], SimulatedPolicy]] = {
    "yunlu": _make_own,
    "yunlu-blind": _make_own_blind,
    **{name: _make_baseline(name) for name in BASELINES},
}
"""``yunlu-blind`` knows what Pollux knows: no lengths, and nothing of other jobs."""


def make_policy(name: str) -> SimulatedPolicy:
    """A known policy, or a user's: ``module:Class`` with ``decide`` and optionally ``estimator``."""
    if name in POLICIES:
        return POLICIES[name]()
    if not names_object(name):
        raise SimulationError(
            f"--policy: {name!r} is not known; {did_you_mean(name, POLICIES)}.",
            hint="or name your own: module:Class",
        )
    policy: Policy = make_object(name)
    if not hasattr(policy, "decide"):
        raise SimulationError(f"--policy: {name} has no method decide(state).")
    estimator: Estimator | None = getattr(policy, "estimator", None)
    return SimulatedPolicy(
        name=getattr(policy, "name", name),
        policy=policy,
        estimator=estimator,
        is_shared=bool(getattr(policy, "is_shared", False)),
    )
