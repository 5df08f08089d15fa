"""How memory and the choice of a layout are judged. Frozen before any tuning.

- **Memory, LOMO**: each model of a source in turn; constants, habits and intervals come from the rows
  of other models (and sources) that ran. Predicted is what the source reports: of nanotron, the
  first stage's peak (its log is written by rank 0), in GiB.
- **Screen, LOMO**: all rows of nanotron, ran or failed. Predicted to fail: more memory than the device
  has, or known not to run. Constants and the threshold come from the other models.
- **Layouts, LOMO**: groups of one model and number of devices, of the batch of 256 that the sweep is
  about, where some layout ran. Candidates are all rows of the group, those that failed too (they
  score 0). Score: the chosen row's tokens/s over the best of the group. After k probes: the best of
  the k tried. Time, memory and whatever else is learned come from other models; what a probe
  measured may be used for the next within its own group only.
- **Fine-tuning**: models of the fine-tuning table in turn, as in the first.

No mask looks at what was measured, but for whether anything was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SWEEP = "nanotron_playbook"
SWEEP_BATCH = 256
PROBES = 5


@dataclass(frozen=True)
class MemoryFold:
    """Rows to learn from (all of them; who learns from memory takes those that ran), and to judge."""

    name: str
    fit: np.ndarray
    test: np.ndarray


def leave_model_out(source: np.ndarray, model: np.ndarray, name: str) -> Iterator[MemoryFold]:
    """Each model of the named source in turn, against everything else."""
    own = source == name
    for held in sorted(set(model[own])):
        test = own & (model == held)
        yield MemoryFold(str(held), ~test, test)


def sweep_groups(
    source: np.ndarray,
    model: np.ndarray,
    devices: np.ndarray,
    batch: np.ndarray,
    ran: np.ndarray,
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Model, devices and rows of every group of the sweep in which something ran."""
    own = (source == SWEEP) & (batch == SWEEP_BATCH)
    for held in sorted(set(model[own])):
        for count in sorted(set(devices[own])):
            rows = np.flatnonzero(own & (model == held) & (devices == count))
            if len(rows) and ran[rows].any():
                yield str(held), int(count), rows
