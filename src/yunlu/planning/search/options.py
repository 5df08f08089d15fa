"""Plan options: the best few plans of a job, and why none meets its goal. Values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.errors import YunluError
from yunlu.core.value import Value
from yunlu.planning.plan import Plan
from yunlu.spec.goal import Objective

if TYPE_CHECKING:
    from collections.abc import Iterator


class PlanError(YunluError):
    """The request is impossible, or impossible on this hardware."""

    code = "plan"


class PlanOptions(Value):
    """The best few plans, best first."""

    options: tuple[Plan, ...] = Field(min_length=1)
    objective: Objective
    problems: tuple[str, ...] = ()
    """Why no option meets the goal, and what to change; then the options are the nearest."""
    notes: tuple[str, ...] = ()
    """Assumptions, and what would improve the answer."""
    layouts: int
    """Number of combinations that were searched."""

    @property
    def best(self) -> Plan:
        """The first."""
        return self.options[0]

    def __iter__(self) -> Iterator[Plan]:  # pyright: ignore[reportIncompatibleMethodOverride] - the options, not pydantic's pairs
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __getitem__(self, index: int) -> Plan:
        return self.options[index]

    def replace(self, **changes: Any) -> Plan:
        """The best option with changes."""
        return self.best.replace(**changes)

    def explain(self) -> str:
        """Every option as text."""
        return "\n\n".join(option.explain() for option in self.options)

    def to_json(self) -> str:
        """Everything, for programs."""
        return self.model_dump_json(indent=2)
