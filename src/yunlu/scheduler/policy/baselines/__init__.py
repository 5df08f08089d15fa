"""Baseline policies that a pool can select: simple and well known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.scheduler.policy.baselines.backfill import Backfill
from yunlu.scheduler.policy.baselines.fair import Fair
from yunlu.scheduler.policy.baselines.fifo import Fifo
from yunlu.scheduler.policy.baselines.fixed import Fixed
from yunlu.scheduler.policy.baselines.optimus import Optimus
from yunlu.scheduler.policy.baselines.shortest import Shortest
from yunlu.scheduler.policy.baselines.tiresias import Tiresias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.scheduler.policy.values import Policy

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
