"""A model that is cut up, put together again on one worker: to be exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.parallel.parallel_model import blank_like
from yunlu.training.parallel.redistribute import redistribute
from yunlu.training.parallel.tensor_slices import join_groups, weights_of

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.engine import Engine


def gather_model(engine: Engine, pattern: nn.Module) -> nn.Module | None:
    """The whole model on the leader, none on the others; everyone calls this."""
    held = join_groups({"model": engine.state.model})
    if not engine.world.is_leader:
        redistribute(held, [])
        return None
    model = blank_like(pattern)
    aliases = engine.state.aliases
    redistribute(held, join_groups({"model": weights_of([model], aliases=aliases)}))
    return model
