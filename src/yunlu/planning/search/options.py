"""Plan options: hardware, layout and their predicted memory, time and cost. Values only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from yunlu.core.errors import YunluError
from yunlu.core.value import Value
from yunlu.hardware.offer import HERE
from yunlu.planning.layout import Layout
from yunlu.planning.plan import PrecisionName, Recompute
from yunlu.planning.search.explain import explain_option
from yunlu.spec.goal import Objective


class PlanError(YunluError):
    """The request is impossible, or impossible on this hardware."""

    code = "plan"


class Interval(Value):
    """Expected value and 80 % interval."""

    value: float
    low: float
    """10 % quantile."""
    high: float
    """90 % quantile."""

    def times(self, factor: float) -> Interval:
        """All three, multiplied."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class Hardware(Value):
    """Nodes of one kind."""

    cloud: str
    """``here`` for this machine."""
    instance: str
    region: str
    nodes: int
    device: str
    devices_per_node: int
    spot: bool
    """Whether the cloud may preempt them."""
    dollars_per_hour: float | None
    """Price of all nodes; None where unknown."""
    memory_bytes: float
    """Memory of one device."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        """Such as ``aws p5.48xlarge x 2, spot``."""
        name = self.cloud if self.cloud == HERE else f"{self.cloud} {self.instance}"
        count = f" x {self.nodes}" if self.nodes > 1 else ""
        return f"{name}{count}{', spot' if self.spot else ''}"


class PlanOption(Value):
    """One option: hardware, layout and prediction."""

    hardware: Hardware
    layout: Layout
    batch: int
    """Global batch in samples."""
    micro_batch: int
    accumulation: int
    """Micro-batches per step, of each replica."""
    recompute: Recompute
    precision: PrecisionName
    steps: int
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with the batch."""
    lr_factor: float = 1.0
    """Factor on the rate of the job's ``base_batch``."""
    memory_bytes: Interval
    """Peak of one device."""
    headroom: float
    """Free share of the device's memory even at the 90 % quantile."""
    step_s: Interval
    samples_per_s: Interval
    tokens_per_s: Interval | None
    """None where samples have no tokens."""
    total_s: Interval
    """From requesting the nodes to the finished model."""
    dollars: Interval | None
    """None where the price is unknown."""
    memory_parts: dict[str, float]
    """Bytes by component."""
    step_parts: dict[str, float]
    """Seconds of a step by component."""
    total_parts: dict[str, float]
    """Seconds in total: start-up, steps, evaluation, interruptions."""
    reason: str = ""
    """Why it won or lost."""
    _again: Callable[[dict[str, Any]], PlanOption] | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        # Not compared: whether an option can be predicted again.
        return isinstance(other, PlanOption) and self.__dict__ == other.__dict__

    __hash__ = Value.__hash__

    def replace(self, **changes: Any) -> PlanOption:
        """The same hardware with another layout or work, predicted and checked again.

        Args:
            changes: ``dp``, ``fsdp``, ``tp``, ``pp``, ``zero1``, ``batch``, ``micro_batch``,
                ``recompute``, ``precision``, ``nodes``, ``spot``. What is not said stays, but
                ``dp``, ``fsdp`` and ``micro_batch`` follow where they must.
        """
        if self._again is None:
            raise TypeError("an option read from a file has forgotten its job: plan it again")
        return self._again(changes)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Values for ``--set`` that train a job exactly so."""
        layout = {axis: self.layout.size_of(axis) for axis in ("dp", "fsdp", "tp", "pp")}
        switches = {name: True for name in ("sequence", "zero1") if getattr(self.layout, name)}
        stages = self.layout.stages_per_rank
        more = {"schedule": "interleaved", "stages_per_rank": stages} if stages > 1 else {}
        return (
            f"devices={self.layout.world}",
            f"layout={json.dumps({**layout, **switches, **more})}",
            f"train.batch={self.batch}",
            f"train.micro_batch={self.micro_batch}",
            f"train.recompute={self.recompute}",
            f"train.precision={self.precision}",
            *([] if self.lr_scaling == "none" else [f"train.optimizer.scaling={self.lr_scaling}"]),
        )

    def explain(self) -> str:
        """Memory and time by component."""
        return explain_option(self)

    def to_json(self) -> str:
        """Everything, for programs."""
        return self.model_dump_json(indent=2)

    def with_recall(self, again: Callable[[dict[str, Any]], PlanOption]) -> PlanOption:
        """The same, with the query to predict it again."""
        copy = self.model_copy()
        copy._again = again
        return copy


class PlanOptions(Value):
    """The best few, best first."""

    options: tuple[PlanOption, ...] = Field(min_length=1)
    objective: Objective
    problems: tuple[str, ...] = ()
    """Why no option meets the goal, and what to change; then the options are the nearest."""
    notes: tuple[str, ...] = ()
    """Assumptions, and what would improve the answer."""
    layouts: int
    """Number of combinations that were searched."""

    @property
    def best(self) -> PlanOption:
        """The first."""
        return self.options[0]

    def __iter__(self) -> Iterator[PlanOption]:  # pyright: ignore[reportIncompatibleMethodOverride] - the options, not pydantic's pairs
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __getitem__(self, index: int) -> PlanOption:
        return self.options[index]

    def replace(self, **changes: Any) -> PlanOption:
        """The best option with changes."""
        return self.best.replace(**changes)

    def explain(self) -> str:
        """Every option as text."""
        return "\n\n".join(option.explain() for option in self.options)

    def to_json(self) -> str:
        """Everything, for programs."""
        return self.model_dump_json(indent=2)
