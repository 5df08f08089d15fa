"""Workers of one site make their steps together; sites meet rarely.

Between machines of a site links are fast, between sites they are slow: gradients are summed in every step
within the site, and one worker of each site exchanges weights with those of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.communication.allreducer import AllReducer


@dataclass(frozen=True, slots=True)
class Site:
    """Our own."""

    allreducer: AllReducer
    """Of gradients, over its workers."""
    numbers: AllReducer
    """Of a few numbers of each step."""

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Each summed over the workers of the site."""
        flat = torch.tensor(numbers, dtype=torch.float64)
        self.numbers.begin(flat, key=0).wait()
        return flat.tolist()

    def close(self) -> None:
        """Hang up."""
        self.allreducer.close()
        self.numbers.close()


def group_by_site(names: Sequence[str]) -> list[list[int]]:
    """The ranks of each site, in order; the first of each speaks for it."""
    sites: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        sites.setdefault(name, []).append(rank)
    return list(sites.values())
