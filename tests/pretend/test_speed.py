"""Training never waits for the accelerator but once in a step, and never copies what it can have ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def test_a_step_waits_once_and_batches_come_beside_it(on_pretend: Callable[..., str]) -> None:
    on_pretend([PROGRAMS / "steps.py"], memory=256 << 20, PRETEND_NO_FLOAT64="1")


def test_fetching_ahead_changes_no_random_number(on_pretend: Callable[..., str]) -> None:
    """A checkpoint holds the state before the step that is fetched ahead; compilers are tried where known."""
    on_pretend([PROGRAMS / "ahead.py"])
