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
"""Where others register theirs: a class that is made without arguments."""


class PolicyError(YunluError):
    """There is no such way to share devices."""

    code = "policy"


def open_policy(name: str) -> Policy:
    """The policy of this name, new and without notes."""
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
    """Who makes a model of what was seen of a run.

    Args:
        first: The most devices for a program that nobody has seen; it must be able to start on them.
        types: Those of the pool: what was seen on one says something of the others.
    """
    from yunlu.scheduler.policy.fitting import Fitter  # noqa: PLC0415 (arrays: slow to import)

    # From there sizes are tried step by step.
    if len(types) <= 1:
        return Fitter(first_devices=first)
    from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter  # noqa: PLC0415 (as above)
    from yunlu.scheduler.speed_estimates import catalog_speeds  # noqa: PLC0415 (as above)

    mixed = CrossTypeFitter(types=types, prior=catalog_speeds())
    return replace(mixed, fitter=replace(mixed.fitter, first_devices=first))
