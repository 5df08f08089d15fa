"""Problem of a job: location, key, expected value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.secrets import mask

if TYPE_CHECKING:
    from collections.abc import Sequence

Path = tuple[str | int, ...]
"""The way from the top of a job to one value: keys, and positions in lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to mend. Line and column count from 1; absent for overrides and Python callers."""

    key: str
    message: str
    line: int | None = None
    column: int | None = None
    override: str | None = None
    """The key of the ``--set`` that brought it in."""

    def __str__(self) -> str:
        if self.override is not None:
            index = f"--set {self.override}"
            parts = (index, "" if self.key == self.override else self.key, self.message)
        else:
            index = f"line {self.line}" if self.line else ""
            index += f", column {self.column}" if self.line and self.column else ""
            parts = (index, self.key, self.message)
        return ": ".join(part for part in parts if part)


class InvalidJobError(JobError):
    """A job with problems: all of them, in the order they stand in the file."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        # Whoever prints them: a message may quote what stands in the job.
        shown = [replace(problem, message=mask(problem.message)) for problem in problems]
        self.problems = tuple(sorted(shown, key=_position))
        count = len(self.problems)
        title = f"{where}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n".join([title, *(f"  {problem}" for problem in self.problems)]))


def show_path(path: Path) -> str:
    """``("train", "betas", 1)`` → ``train.betas[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _position(problem: Problem) -> tuple[int, int]:
    # What came by --set stands after what stands in the file.
    return (problem.line or 2**31, problem.column or 0)
