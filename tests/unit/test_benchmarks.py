"""The arithmetic of ``benchmarks/trainers.py``, and that all its contenders train the same thing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.trainers_parts.contenders import CONTENDERS
from benchmarks.trainers_parts.figures import (
    BAND_FLOOR,
    TARGETS,
    Run,
    against,
    agrees,
    judge,
    make_table,
    spread,
)
from benchmarks.trainers_parts.marks import Marks, begins_of, step_starts
from benchmarks.trainers_parts.rounds import list_cases
from benchmarks.trainers_parts.setup import Setup
from benchmarks.trainers_parts.workloads import WORKLOADS, make_arrays, make_texts
from hypothesis import given
from hypothesis import strategies as st

STEPS = 12


def make(contender: str = "hand", **changes: Any) -> Run:
    values: dict[str, Any] = {
        "workload": "mlp",
        "mode": "same",
        "contender": contender,
        "round": 0,
        "cpu_s": 0.002,
        "wall_s": 0.003,
        "start_cpu_s": 2.0,
        "peak_bytes": 300 * 2**20,
        "training_peak_bytes": 290 * 2**20,
        "losses": tuple(math.exp(-step / 50) for step in range(200)),
    }
    return Run(**values | changes)


def test_ratios_are_taken_within_a_round() -> None:
    # The second round ran on a machine twice as slow: that is no news about the contender.
    base = [make(round=0, cpu_s=1.0), make(round=1, cpu_s=2.0), make(round=3, cpu_s=9.0)]
    own = [
        make("yunlu", round=0, cpu_s=1.1),
        make("yunlu", round=1, cpu_s=2.0),
        make("yunlu", round=2, cpu_s=50.0),
    ]
    found = against(own, base, "cpu")
    assert found is not None
    assert (found.low, found.middle, found.high) == pytest.approx((1.0, 1.05, 1.1))


def test_a_row_without_a_partner_has_no_ratio() -> None:
    assert against([make("yunlu", round=4)], [make(round=0)], "cpu") is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_the_median_lies_within_the_range(values: list[float]) -> None:
    found = spread(values)
    assert found.low <= found.middle <= found.high
    assert {found.low, found.high} <= set(values)


def test_losses_agree_only_when_they_are_equal_under_the_same_settings() -> None:
    base = make()
    apart = [*base.losses]
    apart[50] += 1e-3
    assert agrees(base, base)
    assert not agrees(make(losses=tuple(apart)), base)
    assert agrees(make(losses=tuple(apart), mode="defaults"), base)


def test_losses_disagree_when_the_end_is_elsewhere_or_not_a_number() -> None:
    base = make(mode="defaults", losses=(1.0,) * 100 + (0.5,) * 100)
    worse = (1.0,) * 100 + (0.5 + 5 * BAND_FLOOR,) * 100
    assert not agrees(make(mode="defaults", losses=worse), base)
    assert not agrees(make(mode="defaults", losses=(*base.losses[:-1], math.nan)), base)
    assert not agrees(make(mode="defaults", losses=base.losses[:-1]), base)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.title)
def test_a_figure_is_met_on_its_own_side_of_the_limit(target: Any) -> None:
    better = -0.001 if target.bound == "at most" else 0.001
    assert target.is_met(target.limit)
    assert target.is_met(target.limit + better)
    assert not target.is_met(target.limit - better)


def test_verdicts_cover_what_was_measured_and_nothing_else() -> None:
    runs = [make(), make("yunlu", cpu_s=0.00205, start_cpu_s=2.8, peak_bytes=330 * 2**20)]
    assert [(each["measured"], each["met"]) for each in judge(runs)] == [
        ("1.025", True),
        ("+0.80", False),
        ("+30", True),
    ]


def test_speed_of_the_text_classifier_is_over_hf_trainer() -> None:
    runs = [
        make("hand", workload="text", mode="defaults", wall_s=1.0),
        make("hf", workload="text", mode="defaults", wall_s=1.2),
        make("yunlu", workload="text", mode="defaults", wall_s=0.4),
    ]
    (verdict,) = judge(runs)
    assert (verdict["measured"], verdict["met"]) == ("3.000", True)


def test_the_table_names_each_contender_with_its_ratios_and_verdicts() -> None:
    table = make_table([make(), make("hf", cpu_s=0.0026), make("yunlu", losses=(9.0,) * 200)])
    assert "| HF Trainer | 1.300 | 1.000 | +0.00 | +0 | +0 |" in table
    assert "Lightning" not in table
    yunlu = next(line for line in table.splitlines() if line.startswith("| Yunlu"))
    assert yunlu.endswith("**no** |")
    assert "| CPU time per 2 ms step | at most 1.030 | 1.000 | reached |" in table


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(0, 6))
def test_steps_are_found_among_probes_and_micro_batches(micros: list[int], probes: int) -> None:
    rows = [(0.0, float(probe), 1) for probe in range(probes)]
    now, history, expected = 100.0, list[dict[str, float]](), list[int]()
    for count in micros:
        began = now
        expected.append(len(rows))
        rows += [(0.0, now + 0.01 + index * 0.1, 1) for index in range(count)]
        now += 0.01 + count * 0.1
        history.append({"at": now, "data_s": 0.01, "compute_s": now - began - 0.01})
    assert step_starts(rows, len(micros), begins_of(history)) == expected


def test_a_contender_that_skips_the_model_is_found_out() -> None:
    rows = [(0.0, 1.0, 1), (0.0, 2.0, 1)]
    with pytest.raises(ValueError, match="2 forward passes were seen in 3 steps"):
        step_starts(rows, 3)
    with pytest.raises(ValueError, match="without a forward pass"):
        step_starts(rows, 3, [0.5, 1.5, 2.5])


def test_marks_keep_losses_as_means(tmp_path: Path) -> None:
    import json

    marks = Marks()
    marks.add()
    marks.see(torch.tensor(6.0), 3)
    marks.save(tmp_path / "marks.json")
    found = json.loads((tmp_path / "marks.json").read_text())
    assert found["losses"] == [2.0]
    assert found["peak_bytes"] >= found["rows"][0][2] > 2**20


def test_every_workload_has_its_contenders() -> None:
    cases = list_cases(list(WORKLOADS), ["hand", "bare", "hf", "yunlu"])
    text = [case for case in cases if case.workload == "text"]
    assert {(case.mode, case.contender) for case in text} == {
        ("defaults", "hand"),
        ("defaults", "hf"),
        ("defaults", "yunlu"),
    }
    assert not [case for case in cases if (case.mode, case.contender) == ("defaults", "bare")]


def test_texts_have_the_lengths_they_are_said_to_have() -> None:
    texts = make_texts()
    lengths = np.array([len(text.split()) for text, _ in texts])
    assert lengths.mean() == pytest.approx(61, abs=3)
    assert np.percentile(lengths, 95) == pytest.approx(153, abs=8)
    assert lengths.max() <= 256
    assert texts == make_texts()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    for workload in ("mlp", "gpt"):
        make_arrays(directory, workload, steps=STEPS)
    return directory


def set_up(data: Path, workload: str = "mlp") -> Setup:
    return Setup(workload=workload, steps=STEPS, pinned=True, threads=1, directory=data)


@pytest.mark.parametrize("workload", ["mlp", "gpt"])
def test_every_contender_is_given_the_same(data: Path, workload: str) -> None:
    one, other = set_up(data, workload), set_up(data, workload)
    assert one.order == other.order
    assert torch.equal(one.dataset.inputs, other.dataset.inputs)
    assert torch.equal(one.dataset.targets, other.dataset.targets)
    states = one.model.state_dict(), other.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_gpt_has_ten_million_parameters(data: Path) -> None:
    count = sum(weight.numel() for weight in set_up(data, "gpt").model.parameters())
    assert 10e6 <= count <= 11e6


@pytest.fixture(scope="module")
def expected(data: Path) -> list[float]:
    return train("hand", data)


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize("contender", ["bare", "yunlu", "hf", "lightning", "accelerate"])
def test_contenders_learn_the_same_step_by_step(
    contender: str, data: Path, expected: list[float]
) -> None:
    assert train(contender, data) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]


def train(contender: str, data: Path) -> list[float]:
    setup = set_up(data)
    said = CONTENDERS[contender](setup)
    if said:
        return [record["loss"] for record in said["history"]]
    assert len(setup.marks.rows) == STEPS
    return [float(loss) / count for loss, count in setup.marks.losses]
