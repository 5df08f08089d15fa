"""Names that packages register by entry point: one group for each door."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from yunlu.core.errors import YunluError

TASKS = "yunlu.tasks"
OPTIMIZERS = "yunlu.optimizers"
TASK_TRAITS = "yunlu.task_traits"
TRACKERS = "yunlu.trackers"
EXECUTORS = "yunlu.executors"
POLICIES = "yunlu.policies"
SAMPLERS = "yunlu.samplers"
CODECS = "yunlu.codecs"

OWN_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``module:Class``: the user's own code, imported only by the worker."""


def known_names(group: str) -> tuple[str, ...]:
    """The names on offer behind one door. Nothing is imported."""
    return tuple(sorted(_registered(group)))


def load_registered(group: str, name: str, *, kind: str, error: type[YunluError] = JobError) -> Any:
    """Import what is registered under a name; an unknown one is refused with the nearest."""
    points = _registered(group)
    if name not in points:
        raise error(f"There is no {kind} {name!r}.", hint=did_you_mean(name, points))
    return points[name].load()


@cache  # to look through every installed package takes tens of milliseconds
def _registered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
