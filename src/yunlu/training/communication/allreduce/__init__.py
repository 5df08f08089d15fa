"""All-reduce algorithms: in place, bitwise equal on all workers and in every run."""

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
    "ALGORITHMS",
    "AllReduceFunction",
    "direct_allreduce",
    "double_tree_allreduce",
    "doubling_allreduce",
    "hierarchical_allreduce",
    "ring_allreduce",
    "server_allreduce",
    "tree_allreduce",
]


class AllReduceFunction(Protocol):
    """Sum a flat CPU tensor over the workers of a transport, in place."""

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
