"""The arithmetic of owning and renting."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.hardware.entries import HOURS_PER_YEAR, Ownership, compare_rent

PLAIN = Ownership(
    purchase_dollars=87_660,
    years=2,
    power_kw=2,
    idle_share=0,
    dollars_per_kwh=0.5,
    cooling=1,
    utilisation=0.5,
)


def test_an_hour_of_work_bears_its_share_of_everything() -> None:
    assert PLAIN.used_hours == pytest.approx(8766)
    assert PLAIN.working_dollars_per_hour == 1
    assert PLAIN.dollars_per_hour == pytest.approx(10 + 1)


def test_each_cost_counts() -> None:
    costs = PLAIN.model_copy(
        update={"yearly_dollars": 8766.0, "resale_dollars": 8766.0, "interest": 0.1}
    )
    assert costs.upkeep_dollars == 2 * 8766
    bound = (87_660 + 8766) / 2
    assert costs.capital_dollars == pytest.approx(87_660 - 8766 + bound * 0.1 * 2)
    warm = PLAIN.model_copy(update={"cooling": 1.5, "idle_share": 0.2})
    assert warm.power_dollars == pytest.approx(8766 * 1.5 + 8766 * 0.3)


def test_owning_pays_from_where_both_cost_the_same() -> None:
    even = compare_rent(PLAIN, 21.0)
    assert even.hours == pytest.approx(87_660 / 20)
    assert even.utilisation == pytest.approx(0.25)
    assert even.owning_wins
    assert compare_rent(PLAIN, 11.0).rent_dollars == pytest.approx(PLAIN.total_dollars)
    assert not compare_rent(PLAIN, 10.0).owning_wins


def test_where_power_alone_costs_more_owning_never_pays() -> None:
    even = compare_rent(PLAIN, 0.9)
    assert math.isinf(even.hours)
    assert not even.owning_wins


MONEY = st.floats(0, 1e7)


@given(
    own=st.builds(
        Ownership,
        purchase_dollars=MONEY,
        years=st.floats(0.5, 10),
        resale_dollars=st.just(0.0),
        interest=st.floats(0, 0.3),
        power_kw=st.floats(0.1, 200),
        idle_share=st.floats(0, 1),
        dollars_per_kwh=st.floats(0, 1),
        cooling=st.floats(1, 2),
        utilisation=st.floats(0.01, 1),
        yearly_dollars=st.floats(0, 1e6),
    ),
    rent=st.floats(0.01, 1000),
)
def test_at_the_break_even_owning_and_renting_cost_the_same(own: Ownership, rent: float) -> None:
    even = compare_rent(own, rent)
    assert even.hours >= 0
    if math.isinf(even.hours) or not 1e-3 < even.utilisation <= 1:
        return
    there = own.model_copy(update={"utilisation": even.utilisation})
    assert there.total_dollars == pytest.approx(rent * there.used_hours, rel=1e-6, abs=1e-6)
    assert there.used_hours == pytest.approx(even.hours)
    assert there.used_hours <= own.years * HOURS_PER_YEAR * (1 + 1e-9)
