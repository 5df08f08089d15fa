"""Who had better step aside, so that a synchronous step need not wait for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.test_communication import even, language_model, with_slow_host
from yunlu.planning.communication.method_choice import (
    MethodQuery,
    StragglerExclusion,
    choose,
    find_stragglers_to_exclude,
)
from yunlu.planning.communication.timing import WireFigures


def ask(
    figures: WireFigures, *, guarantee: str = "exact", steps_left: int = 1000, **facts: object
) -> StragglerExclusion | None:
    question = MethodQuery.model_validate({"work": language_model(**facts), "guarantee": guarantee})
    return find_stragglers_to_exclude(choose(figures, question), figures, steps_left=steps_left)


def paced(figures: WireFigures, *spans: float) -> WireFigures:
    return figures.model_copy(update={"compute_s": spans})


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_host_at_a_quarter_of_the_bandwidth_steps_aside(slow: int) -> None:
    figures = with_slow_host(even(4), slow, 0.25)
    found = ask(figures)
    assert found is not None
    assert found.ranks == (slow,)
    assert found.hosts == (f"10.0.0.{1 + slow}",)
    assert "10.0.0" in found.reason
    undisturbed = choose(even(4), MethodQuery(work=language_model())).chosen.step_s
    assert found.step_s < 1.25 * undisturbed


def test_host_that_computes_slowly_steps_aside_with_all_its_workers() -> None:
    figures = paced(even(6, bytes_per_s=1e9, per_host=2), 0.1, 0.1, 0.1, 0.1, 0.5, 0.5)
    found = ask(figures, compute_s=0.1)
    assert found is not None
    assert found.ranks == (4, 5)
    assert found.step_s == pytest.approx(0.15, rel=0.1)  # 6 shares of 0.1 among 4


def test_several_step_aside_one_after_another() -> None:
    figures = with_slow_host(with_slow_host(even(8), 6, 0.1), 3, 0.2)
    found = ask(figures)
    assert found is not None
    assert found.ranks == (3, 6)


def test_two_that_are_equally_slow_leave_together() -> None:
    figures = with_slow_host(with_slow_host(even(5), 2, 0.1), 4, 0.1)
    found = ask(figures)
    assert found is not None
    assert found.ranks == (2, 4)


def test_who_costs_the_others_little_stays_though_a_slower_one_leaves() -> None:
    figures = with_slow_host(with_slow_host(even(4), 2, 0.6), 3, 0.1)
    found = ask(figures, compute_s=0.3, backward_s=0.1)
    assert found is not None
    assert found.ranks == (3,)


def test_nobody_leaves_where_all_links_are_alike_however_slow() -> None:
    assert ask(even(4, bytes_per_s=1e5)) is None


def test_the_first_host_stays_whatever_it_is_like() -> None:
    assert ask(with_slow_host(even(4), 0, 0.1)) is None


def test_who_computes_much_is_needed_though_its_link_is_slow() -> None:
    assert ask(with_slow_host(even(4), 3, 0.25), compute_s=20.0, backward_s=1.0) is None


def test_nobody_leaves_for_the_last_few_steps() -> None:
    assert ask(with_slow_host(even(4), 3, 0.25), steps_left=5) is None


def test_of_two_hosts_the_second_steps_aside_where_the_first_alone_is_faster() -> None:
    figures = even(3, bytes_per_s=2.5e5, per_host=2)
    found = ask(figures)
    assert found is not None
    assert found.ranks == (2,)
    assert found.step_s < 0.2
    assert ask(even(3, bytes_per_s=1e9, per_host=2)) is None


def test_one_host_has_nobody_to_wait_for() -> None:
    assert ask(paced(even(2, per_host=2), 0.1, 0.4)) is None


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.floats(0.02, 1.0), min_size=2, max_size=6),
    spans=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    guarantee=st.sampled_from(["exact", "near"]),
)
def test_those_who_stay_are_at_least_a_quarter_faster_and_one_always_stays(
    shares: list[float], spans: list[float], guarantee: str
) -> None:
    figures = even(len(shares))
    for host, share in enumerate(shares):
        figures = with_slow_host(figures, host, share)
    figures = paced(figures, *spans[: len(shares)])
    found = ask(figures, guarantee=guarantee, steps_left=10_000)
    if found is None:
        return
    assert 0 not in found.ranks
    rest = figures
    for host in found.hosts:
        rest = rest.without(host)
    assert rest.size == len(shares) - len(found.ranks) >= 1
    question = MethodQuery.model_validate({"work": language_model(), "guarantee": guarantee})
    before = choose(figures, question).chosen.cost_s
    assert choose(rest, question).chosen.cost_s <= 0.751 * before
