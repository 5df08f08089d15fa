"""Who gets how many devices: exact where it can be, never more than there are, nobody moved for nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from benchmarks.tune_parts.elastic import Bracket, measure, power_of, run_elastic, run_static
from hypothesis import given
from hypothesis import strategies as st

from yunlu.tuning.study_runner.device_shares import (
    USUAL_POWER,
    Aim,
    DeviceClaim,
    find_promises,
    fit_power,
    share_devices,
)
from yunlu.tuning.values import Point, Trial, TrialState

AIMS: list[Aim] = ["rung", "best"]


def claim(number: int, work_s: float = 60.0, held: int = 0, **more: object) -> DeviceClaim:
    return replace(DeviceClaim(number=number, work_s=work_s, held=held), **more)  # pyright: ignore[reportArgumentType]


claims = st.lists(
    st.builds(
        DeviceClaim,
        number=st.just(0),
        work_s=st.floats(0.0, 1000.0),
        held=st.integers(0, 4),
        beyond_s=st.floats(0.0, 100.0),
        promise=st.floats(0.0, 1.0),
        least=st.integers(1, 2),
        most=st.integers(2, 9),
        power=st.floats(0.5, 1.0),
        resize_s=st.floats(0.0, 20.0),
        start_s=st.floats(0.0, 20.0),
        is_pinned=st.booleans(),
    ),
    max_size=7,
).map(lambda found: [replace(each, number=place) for place, each in enumerate(found)])


@given(wanted=claims, devices=st.integers(1, 12), aim=st.sampled_from(AIMS))
def test_no_more_than_there_are_and_nobody_who_runs_is_sent_away(
    wanted: list[DeviceClaim], devices: int, aim: Aim
) -> None:
    running: list[DeviceClaim] = []
    for each in wanted:  # as can really be: what is held is there, and is a size that can be used
        held = min(max(each.held, each.least), each.most) if each.held else 0
        fits = sum(c.held for c in running) + held <= devices
        running.append(replace(each, held=held if fits else 0, is_pinned=each.is_pinned and fits))
    shares = share_devices(devices, running, aim=aim)
    assert sum(shares.values()) <= devices
    assert shares.keys() == {each.number for each in running}
    for each in running:
        got = shares[each.number]
        if each.is_pinned:
            assert got == each.held
        elif each.held:
            assert each.least <= got <= each.most
        else:
            assert got == 0 or each.least <= got <= each.most


@given(wanted=claims, devices=st.integers(1, 6))
def test_the_last_of_a_rung_arrives_as_soon_as_it_can(
    wanted: list[DeviceClaim], devices: int
) -> None:
    few = [replace(each, held=0, is_pinned=False, least=1) for each in wanted[:3]]
    if not few or len(few) > devices:
        return
    shares = share_devices(devices, few)
    sizes = [range(1, min(each.most, devices) + 1) for each in few]
    best = min(
        max(each.span_s(size) for each, size in zip(few, chosen, strict=True))
        for chosen in product(*sizes)
        if sum(chosen) <= devices
    )
    assert max(each.span_s(shares[each.number]) for each in few) == pytest.approx(best)


@given(wanted=claims, devices=st.integers(1, 6))
def test_the_expected_time_to_the_best_is_the_least(
    wanted: list[DeviceClaim], devices: int
) -> None:
    few = [replace(each, held=0, is_pinned=False, least=1) for each in wanted[:3]]
    if not few or len(few) > devices:
        return
    shares = share_devices(devices, few, aim="best")

    def cost(sizes: dict[int, int]) -> float:
        return sum(
            max(each.promise, 1e-3) * each.span_s(sizes[each.number], aim="best") for each in few
        )

    sizes = [range(1, min(each.most, devices) + 1) for each in few]
    best = min(
        cost({each.number: size for each, size in zip(few, chosen, strict=True)})
        for chosen in product(*sizes)
        if sum(chosen) <= devices
    )
    assert cost(shares) == pytest.approx(best)


@pytest.mark.parametrize("aim", AIMS)
def test_the_last_one_gets_the_whole_pool(aim: Aim) -> None:
    assert share_devices(8, [claim(3, held=2)], aim=aim) == {3: 8}


def test_freed_devices_go_to_the_more_promising() -> None:
    shares = share_devices(
        4, [claim(0, held=1, promise=0.9), claim(1, held=1, promise=0.1)], aim="best"
    )
    assert shares[0] > shares[1] >= 1


def test_three_that_are_left_share_eight_devices() -> None:
    assert sorted(share_devices(8, [claim(n) for n in range(3)]).values()) == [2, 3, 3]


def test_more_trials_than_devices_get_one_each() -> None:
    shares = share_devices(8, [claim(n) for n in range(27)])
    assert sorted(shares.values(), reverse=True) == [1] * 8 + [0] * 19


@pytest.mark.parametrize("aim", AIMS)
def test_nobody_is_resized_for_less_than_it_costs(aim: Aim) -> None:
    almost_there = claim(0, work_s=4.0, held=4, resize_s=2.0)
    assert share_devices(8, [almost_there], aim=aim) == {0: 4}
    assert share_devices(8, [replace(almost_there, work_s=400.0)], aim=aim) == {0: 8}


def test_what_was_shared_stays_shared() -> None:
    """The same question twice has the same answer: nothing goes back and forth."""
    wanted = [claim(n, work_s=40.0 + n, held=1) for n in range(3)]
    first = share_devices(8, wanted)
    again = share_devices(8, [replace(each, held=first[each.number]) for each in wanted])
    assert again == first


@pytest.mark.parametrize("aim", AIMS)
def test_a_spare_device_does_not_wander(aim: Aim) -> None:
    """What is left of work and promise is an estimate: it changes a little all the time."""
    wanted = [
        claim(0, work_s=95.0, held=2, promise=0.5),
        claim(1, work_s=100.0, held=1),
        claim(2, held=1),
    ]
    assert share_devices(4, wanted, aim=aim) == {0: 2, 1: 1, 2: 1}
    much = [replace(wanted[0], work_s=5.0), replace(wanted[1], work_s=900.0), wanted[2]]
    # The rung ends soonest if the first is let arrive: then both of its devices are free.
    assert share_devices(4, much, aim=aim)[1] == (2 if aim == "best" else 1)


def test_one_that_is_large_shrinks_for_others_that_come() -> None:
    shares = share_devices(8, [claim(0, work_s=600.0, held=8), claim(1, work_s=600.0)])
    assert shares == {0: 4, 1: 4}


def test_one_that_is_about_to_arrive_is_waited_for() -> None:
    shares = share_devices(8, [claim(0, work_s=0.01, held=8), claim(1, work_s=600.0)])
    assert shares == {0: 8, 1: 0}


def test_a_layout_gets_multiples() -> None:
    assert share_devices(7, [claim(0, multiple=2), claim(1, multiple=2)]) in (
        {0: 4, 1: 2},
        {0: 2, 1: 4},
    )


def test_devices_that_were_lost_are_not_asked_back() -> None:
    wanted = [claim(0, held=2, least=2), claim(1, held=2, least=2)]
    assert share_devices(3, wanted) == {0: 2, 1: 2}


def test_claiming_twice_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="twice"):
        share_devices(2, [claim(0), claim(0)])


def test_promise_is_the_rank_at_the_own_rung() -> None:
    def trial(number: int, *values: float) -> Trial:
        points = tuple(Point(r, (v,), 1.0) for r, v in enumerate(values, start=1))
        return Trial(number=number, params={}, state=TrialState.RUNNING, points=points)

    promises = find_promises([trial(0), trial(1, 0.5), trial(2, 0.9), trial(3, 0.1, 0.7)])
    assert promises[0] == 0.5
    assert promises[1] > promises[2]
    assert promises[3] == 0.5  # the only one at its rung
    assert promises[1] == pytest.approx(0.5)  # beats one, is beaten by one


def test_the_power_of_scaling_is_learnt_from_two_sizes() -> None:
    assert fit_power([]) == USUAL_POWER
    seen = [(1, 8.0, 2, 8.0 / 2**0.7), (2, 8.0 / 2**0.7, 4, 8.0 / 4**0.7)] * 50
    assert fit_power(seen) == pytest.approx(0.7, abs=0.02)
    assert fit_power([(1, 1.0, 4, 9.0)] * 50) == 0.3  # slower with more, but not for ever


def test_the_simulated_bracket_reaches_its_figure() -> None:
    figures = measure(quick=True)
    assert [each.is_met for each in figures if each.is_met is not None] == [True]


@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_elastic_is_no_faster_than_all_devices_always_busy(devices: int) -> None:
    for bracket in (Bracket(trials=27), Bracket(trials=10, uneven=0.5)):
        whole = sum(map(sum, bracket.legs()))
        assert run_elastic(bracket, devices) >= whole / devices * 0.999
        assert run_static(bracket, devices) >= run_elastic(bracket, devices) * 0.999
    slow = run_elastic(Bracket(), devices, power=power_of(0.8))
    assert slow >= run_elastic(Bracket(), devices)
