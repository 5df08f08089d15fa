"""Yunlu's own method: what ``method: auto`` means for one objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.tuning.methods.frontier import Frontier

if TYPE_CHECKING:
    from yunlu.tuning.values import Dimension


def make_yunlu(dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> Frontier:  # noqa: ARG001
    """A fresh one."""
    return Frontier(dimensions, seed=seed)
