"""Policies by name: ``yunlu``, the baselines, or your own ``module:Class``."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError, did_you_mean
from yunlu.core.imports import make_object, names_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.scheduler.policy.observations import Estimator
    from yunlu.scheduler.policy.values import Policy

GROUP = "yunlu.policies"
"""Entry point group of further policies: a class without constructor arguments."""


class PolicyError(YunluError):
    """Unknown policy."""

    code = "policy"


def open_policy(name: str) -> Policy:
    """A new instance of the policy of this name."""
    from yunlu.scheduler.policy.allocator import Allocator  # noqa: PLC0415
    from yunlu.scheduler.policy.baselines import BASELINES  # noqa: PLC0415 (arrays: slow to import)

    known: dict[str, Callable[[], Policy]] = {"yunlu": Allocator, **BASELINES}
    if name in known:
        return known[name]()
    if names_object(name):
        policy = make_object(name)
        if not hasattr(policy, "decide"):
            raise PolicyError(f"{name} is not a policy: it has no method decide(state)")
        return policy
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        text = did_you_mean(name, {**known, **points})
        raise PolicyError(f"there is no policy {name!r}", hint=f"{text}; or your module:Class")
    return points[name].load()()


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
    from yunlu.scheduler.speed_estimates import catalog_speeds  # noqa: PLC0415 (as above)

    mixed = CrossTypeFitter(types=types, prior=catalog_speeds())
    return replace(mixed, fitter=replace(mixed.fitter, first_devices=first))
