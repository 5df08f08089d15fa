"""Ways to add up a tensor over all workers: in place, with the same bits on each of them, in any run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from yunlu.training.communication.allreduce.doubling import doubling_allreduce
from yunlu.training.communication.allreduce.hierarchical import hierarchical_allreduce
from yunlu.training.communication.allreduce.reduce_scatter_gather import (
    direct_allreduce,
    server_allreduce,
)
from yunlu.training.communication.allreduce.ring import ring_allreduce
from yunlu.training.communication.allreduce.trees import double_tree_allreduce, tree_allreduce

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.transport import Transport

__all__ = [
    "SUMS",
    "SumFunction",
    "direct_sum",
    "double_tree_sum",
    "doubling_sum",
    "hierarchical_sum",
    "ring_sum",
    "served_sum",
    "tree_sum",
]


class AllReduceFunction(Protocol):
    """Adds up a flat CPU tensor over the workers of a wire, in place."""

    def __call__(self, transport: Transport, /, flat: Tensor, *, tag: int) -> None:
        """See the class."""
        ...


ALGORITHMS: dict[str, AllReduceFunction] = {
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "double-tree": double_tree_allreduce,
    "doubling": doubling_allreduce,
    "direct": direct_allreduce,
    "server": server_allreduce,
    "hierarchical": hierarchical_allreduce,
}
