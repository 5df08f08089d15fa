"""Gathering of a partitioned model on one worker, for export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.parallel.parallel_model import blank_like
from yunlu.training.parallel.redistribute import redistribute
from yunlu.training.tensor_slices import join_groups, weights_of

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.engine import Engine


def gather_model(engine: Engine, template: nn.Module) -> nn.Module | None:
    """The full model on the leader, None on the others; all workers call this."""
    held = join_groups({"model": engine.state.model})
    if not engine.world.is_leader:
        redistribute(held, [])
        return None
    model = blank_like(template)
    aliases = engine.state.aliases
    redistribute(held, join_groups({"model": weights_of([model], aliases=aliases)}))
    return model
