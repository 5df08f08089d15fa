"""Names that packages register by entry point: tasks, trackers, executors."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

TASKS = "yunlu.tasks"
TRACKERS = "yunlu.trackers"

OWN_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``module:Class``: the user's own code, imported only by the worker."""


@cache  # to look through every installed package takes tens of milliseconds
def known_names(group: str) -> tuple[str, ...]:
    """The names on offer behind one door. Nothing is imported."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))
