"""Step times of pipeline-parallel models: several devices hold one copy and share its micro-batches.

The tables of such an application (``gpt_pmp`` in the artifact of Sia, SOSP'23) tell for each shape how
long one stage takes forward with one micro-batch of so many samples, and how long copies take to sum
their gradients. A pass of ``micro_batches`` takes three times as long as forwards alone, and as long
again as the stages but one to fill and drain. A device's samples are its share of its copy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.lab.simulation.step_times import Shape, StepTimes, Times, normalise
from yunlu.lab.simulation.tables import SimulationError, read_count, read_number, read_rows

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS = ("placement", "local_bsz", "step_time", "sync_time")
_FORWARD_AND_BACKWARD = 3.0
_MICRO_BATCH = 1
"""Samples of one micro-batch."""


def load_pipeline_times(
    directory: Path, suffix: str, *, stages: int, micro_batches: int
) -> StepTimes:
    """Read ``placements`` of one type of devices, on which a copy of the model takes ``stages``."""
    if stages < 1 or micro_batches % stages:
        raise SimulationError(
            f"{directory}: {micro_batches} micro-batches cannot be shared by {stages} stages.",
            hint="micro_batches should be a multiple of every number of stages",
        )
    path = directory / f"placements{suffix}.csv"
    local = micro_batches * _MICRO_BATCH // stages
    curves: dict[Shape, list[tuple[int, Times]]] = {}
    for line, row in enumerate(read_rows(path, _COLUMNS)):
        if read_count(path, line, row, "local_bsz") != _MICRO_BATCH:
            continue
        shape = normalise(tuple(int(digit) for digit in row["placement"].strip()))
        if sum(shape) % stages:
            raise SimulationError(
                f"{path}, line {line + 2}: {sum(shape)} devices are no multiple of {stages} stages."
            )
        stage_s, sync_s = (read_number(path, line, row, name) for name in _COLUMNS[2:])
        pass_s = _FORWARD_AND_BACKWARD * (stages - 1 + micro_batches) * stage_s
        curves[shape] = [(local, (pass_s + sync_s, sync_s))]
    if not curves:
        raise SimulationError(f"{path}: nothing was measured with micro-batches of one sample.")
    return StepTimes(directory.name, curves, [])
