"""Layout: sizes of the parallel axes, and the coordinates of each rank."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from yunlu.core.value import Value
from yunlu.spec.layout import read_axes

AXES = ("pp", "dp", "fsdp", "tp")
"""From the outermost to the innermost: ``tp`` communicates the most, so its ranks are adjacent."""

Schedule = Literal["gpipe", "1f1b", "interleaved"]


class RankCoordinates(NamedTuple):
    """Coordinates of a rank on each axis."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    tp: int = 0


class Layout(Value):
    """Size of each parallel axis; one worker for every combination."""

    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas, each with its own samples of a step."""
    fsdp: int = Field(default=1, ge=1)
    """Ways in which weights, gradients and optimiser state are sharded, each with its own samples."""
    tp: int = Field(default=1, ge=1)
    """Ways in which each weight matrix is split."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages, each with some of the layers."""
    sequence: bool = False
    """Sequence parallelism between the split matrices (with ``tp``)."""
    vocabulary: bool = False
    """The loss is computed on the split vocabulary (with ``tp``)."""
    zero1: bool = False
    """Optimiser state is sharded over replicas (with ``dp``)."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule (with ``pp``)."""
    stages_per_rank: int = Field(default=1, ge=1)
    """More than one only where the schedule is interleaved."""

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def replicas(self) -> int:
        """Ways in which the samples of a step are split."""
        return self.dp * self.fsdp

    @property
    def is_single(self) -> bool:
        """Whether there is one worker."""
        return self.world == 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_per_rank

    def place_of(self, rank: int) -> RankCoordinates:
        """Coordinates of a rank."""
        rest, tp = divmod(rank, self.tp)
        rest, fsdp = divmod(rest, self.fsdp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinates(pp=pp, dp=dp, fsdp=fsdp, tp=tp)

    def replica_of(self, rank: int) -> int:
        """Replica index of a rank: its share of a step's samples."""
        coordinates = self.place_of(rank)
        return coordinates.dp * self.fsdp + coordinates.fsdp

    def __str__(self) -> str:
        """Such as ``dp2 x tp2``; ``single`` for one worker."""
        sizes = {axis: self.size_of(axis) for axis in ("dp", "fsdp", "tp", "pp")}
        axes = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return " x ".join(axes) or "single"

    def size_of(self, axis: str) -> int:
        """Size of an axis."""
        sizes = {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "tp": self.tp}
        return sizes[axis]


def parse_layout(text: str) -> Layout | None:
    """Parse ``dp2 x tp2``, ``fsdp4``, ``single``; None where it is not a layout."""
    sizes = read_axes(text)
    return None if sizes is None or "cp" in sizes else Layout.model_validate(sizes)
