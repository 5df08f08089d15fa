"""Trials run by an external program: checks and conversion of its input."""

from __future__ import annotations

from typing import Any

from yunlu.tuning.study_dir import StudyError


def check_function(function: Any, dollars: float | None) -> None:
    """Refuse what cannot be called, and budgets that cannot be tracked."""
    if not callable(function):
        raise StudyError(
            f"optimize calls a function for each trial, and {function!r} is none",
            hint="trials=N says how many there are; without a function they are runs of the job",
        )
    if dollars is not None:
        raise StudyError(
            "a budget applies to runs: the cost of your own function is unknown",
            hint="limit it by trials or deadline",
        )


def read_numbers(value: Any) -> list[float]:
    """One number or several, be they Python's, an array's or a tensor's."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        has_parts = hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0
        return [float(item) for item in value] if has_parts else [float(value)]
    except (TypeError, ValueError):
        raise StudyError(
            f"a trial was told to have the value {value!r}, which is not a number",
            hint="tell a number, or a list of them where there are several objectives",
        ) from None


def describe_error(error: Exception) -> str:
    """Why a trial failed, in one line."""
    return error.message if isinstance(error, StudyError) else f"{type(error).__name__}: {error}"
