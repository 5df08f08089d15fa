"""What a plan needs to know of this machine, measured now where nobody has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.training.probing.stored import keep_probe, recall_probe

if TYPE_CHECKING:
    from yunlu.catalog.machine import Machine
    from yunlu.planning.probed import Probed


def known_probe(machine: Machine) -> Probed:
    """What is stored, or a quick look that then is."""
    found = recall_probe(machine)
    if found is None:
        from yunlu.training.probing.measure import measure_machine  # noqa: PLC0415 - once

        found = measure_machine(quick=True)
        keep_probe(found)
    return found
