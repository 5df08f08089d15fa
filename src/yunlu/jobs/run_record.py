"""A run as one row of a list: record in the index, and what a list adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from yunlu.core.errors import YunluError
from yunlu.core.value import Value
from yunlu.runs.summary import RunSummary


class RunRecord(RunSummary):
    """One row of the index: state and progress after the events before ``offset``."""

    id: str
    name: str
    task: str
    model: str
    offset: int = 0
    """Bytes of ``events.jsonl`` that this record has taken in."""

    @property
    def progress(self) -> float | None:
        """Share of the steps done."""
        return min(1.0, self.step / self.steps) if self.step is not None and self.steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScan:
    """The runs of a home."""

    records: tuple[RunRecord, ...] = ()
    """Of the runs that can be read, newest first."""
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """By name: what is wrong with those that cannot."""


UNREADABLE = (YunluError, OSError, ValueError, RecursionError, TypeError, KeyError)
"""Errors of a run whose files are damaged, or made to do harm: it must not hide the other runs."""


def describe_problem(error: BaseException) -> str:
    """What is wrong with a run that cannot be read."""
    if isinstance(error, YunluError):
        return error.message
    return f"its files cannot be read: {type(error).__name__}: {error}"


class ListedRun(RunRecord):
    """State and progress of a run."""

    dir: str
    """Its directory."""
    eta_s: float | None = None
    """Seconds until the last step at the recent pace; None where that is not known."""
    caution: str = ""
    """Why the state is only what the run's files say: another user's run, or an unknown executor."""


class RunList(Value):
    """Runs, newest first."""

    home: str
    """Directory of all runs."""
    runs: tuple[ListedRun, ...] = ()
    older: int = 0
    """Runs that are left out."""
    problems: dict[str, str] = Field(default_factory=dict)
    """By name: what is wrong with runs that cannot be read."""
