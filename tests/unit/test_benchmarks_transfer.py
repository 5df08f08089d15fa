"""Rate and batch from small runs, on made trainings: what is promised, and no peeking."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
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

from yunlu.planning.hyperparameter_transfer import STEP_LAW, TransferScale

SIZES, TOKENS = (1e8, 4e8), (2e9, 8e9, 3.2e10)
SHIFT = (0.5, -0.5)
"""Octaves by which the made trainings differ from the rule."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables in the format of Step Law: bowls about a moved optimum, a little steeper when cut in two."""
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "steplaw").mkdir()
    for kind, name in FILES.items():
        with (folder / "steplaw" / name).open("w", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["N", "D", "Na", "lr", "bs", "smooth loss"])
            table.writeheader()
            for size, tokens in itertools.product(SIZES, TOKENS):
                best = STEP_LAW.at(TransferScale(parameters=size, tokens=tokens))
                x = math.log2(best.lr) + SHIFT[0]
                y = math.log2(best.batch_tokens) + SHIFT[1]
                for rate, batch in itertools.product(range(-26, -8), range(5, 13)):
                    above = 0.8 * (rate / 2 - x) ** 2 + 0.6 * (batch + 11 - y) ** 2
                    table.writerow(
                        {
                            "N": size,
                            "D": tokens,
                            "Na": size / 2 if kind == "MoE" else "",
                            "lr": f"{2 ** (rate / 2):.4e}",
                            "bs": 2**batch,
                            "smooth loss": 2.5 * math.exp(above / 200),
                        }
                    )
    return folder


@pytest.fixture(scope="module")
def grids(folder: Path) -> list[Grid]:
    return load(folder / "steplaw" / FILES["dense"])


def test_small_runs_find_what_the_rule_alone_does_not(folder: Path) -> None:
    lines: list[str] = []
    figures = measure(folder, lines.append, quick=True)
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
