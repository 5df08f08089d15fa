"""Policies to compare with: simple, well known, and none of them ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.pool.allocation.baselines.backfill import Backfill
from yunlu.pool.allocation.baselines.fair import Fair
from yunlu.pool.allocation.baselines.fifo import Fifo
from yunlu.pool.allocation.baselines.fixed import Fixed
from yunlu.pool.allocation.baselines.optimus import Optimus
from yunlu.pool.allocation.baselines.shortest import Shortest
from yunlu.pool.allocation.baselines.tiresias import Tiresias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.pool.allocation.values import Policy

BASELINES: Mapping[str, Callable[[], Policy]] = {
    "fifo": Fifo,
    "backfill": Backfill,
    "shortest": Shortest,
    "fair": Fair,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "fixed": Fixed,
}
"""How to make each; jobs keep the batch they ask for under all of them."""
