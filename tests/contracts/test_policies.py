"""Every policy behind the door keeps the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from yunlu.core.imports import POLICIES, known_names
from yunlu.hardware.fleet import Placement
from yunlu.scheduler.policies import PolicyError, open_policy
from yunlu.scheduler.policy.baselines import Fifo
from yunlu.testing.policies import PolicyContract

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, Policy, PoolState


class BuiltIn(PolicyContract):
    """A policy of the package, found by its name."""

    policy: ClassVar[str]

    def make_policy(self) -> Policy:
        return open_policy(self.policy)


class TestYunlu(BuiltIn):
    policy = "yunlu"


class TestFifo(BuiltIn):
    policy = "fifo"


class TestBackfill(BuiltIn):
    policy = "backfill"


class TestShortest(BuiltIn):
    policy = "shortest"


class TestFair(BuiltIn):
    policy = "fair"


class TestTiresias(BuiltIn):
    policy = "tiresias"


class TestOptimus(BuiltIn):
    policy = "optimus"


class TestFixed(BuiltIn):
    policy = "fixed"


def test_no_policy_of_the_package_is_without_its_contract() -> None:
    assert {kind.policy for kind in BuiltIn.__subclasses__()} == set(known_names(POLICIES))


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PolicyError, match="There is no policy 'fiffo'") as caught:
        open_policy("fiffo")
    assert "did you mean 'fifo'?" in str(caught.value)


class Generous(Fifo):
    """Gives every job the first device."""

    def decide(self, state: PoolState) -> Decision:
        if not state.nodes:
            return super().decide(state)
        first = Placement(((state.nodes[0].name, 1),))
        return replace(super().decide(state), placements={job.id: first for job in state.jobs})


class Forgetful(Fifo):
    """Restarts everybody."""

    def decide(self, state: PoolState) -> Decision:
        jobs = tuple(replace(job, held=Placement(), is_pinned=False) for job in state.jobs)
        return super().decide(replace(state, jobs=jobs))


@pytest.mark.parametrize(
    ("flawed", "caught_by"),
    [
        (Generous, "test_no_device_is_given_twice_nor_one_that_is_not_there"),
        (Generous, "test_sizes_are_within_the_limits_of_each_job"),
        (Forgetful, "test_pinned_jobs_keep_exactly_what_they_hold"),
    ],
)
def test_the_contract_catches_the_flaw(flawed: type[Fifo], caught_by: str) -> None:
    contract = type("Flawed", (PolicyContract,), {"make_policy": lambda _: flawed()})()
    with pytest.raises(AssertionError):
        getattr(contract, caught_by)()
