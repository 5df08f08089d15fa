"""Policies by name: registered by entry point, or your own ``module:Class``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError
from yunlu.core.imports import POLICIES, load_registered, make_object, names_object

if TYPE_CHECKING:
    from yunlu.scheduler.policy.goodput import Estimator
    from yunlu.scheduler.policy.values import Policy


class PolicyError(YunluError):
    """No such policy."""

    code = "policy"


def open_policy(name: str) -> Policy:
    """A new instance of the policy of this name, registered or the user's own."""
    if names_object(name):
        policy = make_object(name)
    else:
        policy = load_registered(POLICIES, name, kind="policy", error=PolicyError)()
    if not hasattr(policy, "decide"):
        raise PolicyError(f"{name} is not a policy: it has no method decide(state)")
    return policy


def open_estimator(first: int = 1, types: tuple[str, ...] = ()) -> Estimator:
    """The estimator that fits speed models to observations.

    Args:
        first: The most devices for a program that nobody has seen; it must be able to start on them.
        types: Those of the pool: what was seen on one says something of the others.
    """
    from yunlu.scheduler.policy.fitting import Fitter  # noqa: PLC0415 (arrays: slow to import)

    # From there larger sizes are tried step by step.
    if len(types) <= 1:
        return Fitter(first_devices=first)
    from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter  # noqa: PLC0415 (as above)
    from yunlu.scheduler.run_progress import catalog_speeds  # noqa: PLC0415 (as above)

    mixed = CrossTypeFitter(types=types, prior=catalog_speeds())
    return replace(mixed, fitter=replace(mixed.fitter, first_devices=first))
