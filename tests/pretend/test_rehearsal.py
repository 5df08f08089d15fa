"""A rehearsed peak is that of real processes that train on the pretend accelerator."""

from __future__ import annotations

import pytest
from benchmarks.rehearsal import GOAL, compare, ratios
from benchmarks.rehearsal_parts.cases import CASES

QUICK = ("single, LoRA, bf16", "dp2, zero1, lamb", "fsdp4", "pp2, bf16")
"""One of each family; the others take a minute of one core."""
LONG = tuple(name for name in CASES if name not in QUICK)


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="rest", marks=pytest.mark.long)],
)
def test_a_rehearsed_peak_is_the_real_one(names: tuple[str, ...]) -> None:
    found = {one["case"]: one for one in compare(names)}
    assert list(found) == list(names)
    for name, one in found.items():
        assert "error" not in one, (name, one)
        for ratio in ratios(one):
            assert abs(ratio - 1) <= GOAL, (name, ratio)


@pytest.mark.usefixtures("pretend")
@pytest.mark.long
def test_a_worker_that_holds_a_part_never_takes_the_whole_model_to_its_device() -> None:
    (whole, *parts) = compare(["dp2", "fsdp4", "tp2", "pp2"])
    weights = whole["rehearsed"]["ranks"][0]["parts"]["weights"]
    assert all(real["built"] > weights for real in whole["real"])
    assert all(real["built"] < 0.8 * weights for part in parts for real in part["real"])
