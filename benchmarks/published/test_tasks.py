"""The recorded curves that tuners are compared on are all there."""

from __future__ import annotations

from benchmarks.tune_parts.evidence import DEFAULT_FOLDER, TASKS, list_tasks


def test_the_tasks_are_there() -> None:
    names = list_tasks(DEFAULT_FOLDER)
    assert set(TASKS) <= set(names)
    assert sum(name.startswith("lcbench/") for name in names) == 34
    assert sum(name.startswith("taskset/") for name in names) == 12
