"""Rate and batch from small runs, on the recorded trainings of Step Law: what is promised, and no peeking."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.tune_parts.evidence import DEFAULT_FOLDER
from benchmarks.tune_parts.steplaw import (
    BUDGET,
    FILES,
    Grid,
    choose_small,
    load,
    measure,
    search,
    transfer,
)

FOLDER = DEFAULT_FOLDER / "steplaw"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the table of Step Law is not here")


@pytest.fixture(scope="module")
def grids() -> list[Grid]:
    return load(FOLDER / FILES["dense"])


def test_every_figure_is_reached() -> None:
    lines: list[str] = []
    figures = measure(DEFAULT_FOLDER, lines.append, quick=True)
    assert [figure.name for figure in figures if not figure.is_met] == []
    assert len(lines) == len(FILES)


def test_small_runs_never_cost_more_than_the_budget(grids: list[Grid]) -> None:
    for target in grids:
        small, room = choose_small(target, grids)
        if small is not None:
            assert room * small.flops <= BUDGET * target.flops
            places = list(search(small, next(iter(small.losses)), most=room))
            assert len(places) == len(set(places)) <= room
            assert set(places) <= small.losses.keys()


def test_the_targets_own_losses_change_nothing_but_the_score(grids: list[Grid]) -> None:
    target = grids[-1]
    before = transfer(target, grids)
    worse = replace(target, losses={place: 9.0 - loss for place, loss in target.losses.items()})
    after = transfer(worse, [*grids[:-1], worse])
    assert (after.shift, after.cost) == (before.shift, before.cost)
    assert after.excess != before.excess
    small, _ = choose_small(target, grids)
    assert small is not None
    assert small.flops < target.flops
