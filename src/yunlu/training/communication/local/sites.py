"""Sites: workers of one site step together; sites average weights rarely.

Links are fast within a site and slow between sites: gradients are summed in every step
within the site, and one worker of each site averages weights with those of the other sites.
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
    """The site of this worker."""

    allreducer: AllReducer
    """All-reduce of gradients over the site."""
    numbers: AllReducer
    """All-reduce of a few numbers per step."""

    def sum_over_site(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over the workers of the site."""
        flat = torch.tensor(numbers, dtype=torch.float64)
        self.numbers.begin(flat, key=0).wait()
        return flat.tolist()

    def close(self) -> None:
        """Close the connections."""
        self.allreducer.close()
        self.numbers.close()


def group_by_site(names: Sequence[str]) -> list[list[int]]:
    """Ranks of each site, in order; the first is its leader."""
    sites: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        sites.setdefault(name, []).append(rank)
    return list(sites.values())
