"""How urgent jobs are: as theory says where it has an answer, and which way each setting pulls."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.scheduler.policy.value_table import PolicyParams, compute_urgency

DEVICES = np.arange(1, 2001)
PLAIN = PolicyParams(others_power=0.6, turnover_power=60.0, expected_jobs=0.0, longest_weight=0.0)


def urgency(work_s: list[float], params: PolicyParams = PLAIN, power: float = 0.6) -> list[float]:
    speedups = np.tile(DEVICES.astype(float) ** power, (len(work_s), 1))
    return compute_urgency(np.array(work_s), speedups, DEVICES, 2000, params).tolist()


@pytest.mark.parametrize("power", [0.4, 0.6, 0.8])
def test_jobs_that_scale_alike_are_as_urgent_as_in_hesrpt(power: float) -> None:
    params = PolicyParams(
        others_power=power, turnover_power=60.0, expected_jobs=0.0, longest_weight=0.0
    )
    found = urgency([8e4, 1e3, 2e4, 1e2], params, power)
    longest_first = [found[0], found[2], found[1], found[3]]
    inverse = 1 / (1 - power)
    places = np.arange(1, 5)
    expected = (places**inverse - (places - 1) ** inverse) ** (1 - power) / 2000**power
    assert longest_first == pytest.approx(expected.tolist(), rel=0.01)


@given(st.lists(st.floats(10.0, 1e7), min_size=1, max_size=12))
def test_who_has_less_left_is_never_less_urgent(work_s: list[float]) -> None:
    found = urgency(work_s, PolicyParams(longest_weight=0.0))
    ranked = [urgency for _, urgency in sorted(zip(work_s, found, strict=True), reverse=True)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ranked))


def test_the_longest_is_guarded_and_the_short_ones_are_not() -> None:
    plain, guarded = urgency([1e2, 1e5]), urgency([1e2, 1e5], PolicyParams(
        others_power=0.6, turnover_power=60.0, expected_jobs=0.0, longest_weight=0.5))  # fmt: skip
    assert guarded[1] == pytest.approx(1.5 * plain[1])
    assert guarded[0] == pytest.approx(plain[0])


def test_a_job_with_company_to_come_is_more_urgent_and_content_with_less() -> None:
    alone = urgency([1e4])
    expected = urgency(
        [1e4],
        PolicyParams(others_power=0.6, turnover_power=60.0, expected_jobs=3.0, longest_weight=0.0),
    )
    assert alone[0] == pytest.approx(2000**-0.6)
    assert expected[0] > alone[0]


def test_who_cannot_run_is_not_urgent() -> None:
    speedups = np.zeros((1, len(DEVICES)))
    assert compute_urgency(np.array([10.0]), speedups, DEVICES, 2000, PLAIN).tolist() == [0.0]
