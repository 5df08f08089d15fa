"""Communication: what each way to exchange is predicted to take."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.even_links import make_even
from yunlu.planning.communication.step_forecast import MethodSetting, forecast, split_buckets
from yunlu.planning.communication.timing import (
    SCHEDULES,
    Clock,
    CodecCost,
    SharedWork,
    WireFigures,
    elapse,
)

HUNDRED_MBIT = 12.5e6
CODECS = (
    CodecCost(name="fp16", bytes_per_value=2, encode_s_per_value=1e-9, decode_s_per_value=1e-9),
    CodecCost(name="int8", bytes_per_value=1, encode_s_per_value=1e-9, decode_s_per_value=1e-9),
    CodecCost(name="int4", bytes_per_value=0.5, encode_s_per_value=2e-9, decode_s_per_value=2e-9),
    CodecCost(
        name="onebit", bytes_per_value=0.13, encode_s_per_value=1e-9, decode_s_per_value=1e-9
    ),
)


def even(
    workers: int, *, bytes_per_s: float = HUNDRED_MBIT, latency_s: float = 1e-4, per_host: int = 1
) -> WireFigures:
    hosts = tuple(f"10.0.0.{1 + rank // per_host}" for rank in range(workers))
    return make_even(hosts, latency_s=latency_s, bytes_per_s=bytes_per_s).model_copy(
        update={"codecs": CODECS}
    )


def with_slow_host(figures: WireFigures, host: int, share: float) -> WireFigures:
    rates = np.array(figures.bytes_per_s)
    rates[host, :] *= share
    rates[:, host] *= share
    ends = np.where(np.arange(len(rates)) == host, share, 1.0)
    return figures.model_copy(
        update={
            "bytes_per_s": tuple(map(tuple, rates.tolist())),
            "send_bytes_per_s": tuple((np.array(figures.send_bytes_per_s) * ends).tolist()),
            "receive_bytes_per_s": tuple((np.array(figures.receive_bytes_per_s) * ends).tolist()),
        }
    )


def language_model(**facts: object) -> SharedWork:
    """0.8M parameters in 16 weights."""
    told = {"gradient_bytes": (200_000,) * 16, "compute_s": 0.05, "backward_s": 0.03, **facts}
    return SharedWork.model_validate(told)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("method", SCHEDULES)
def test_every_schedule_adds_up_what_all_have(method: str, workers: int) -> None:
    """Whoever sends has by then heard from all it speaks for; in the end everyone has heard of everyone."""
    heard = [{rank} for rank in range(workers)]
    for each in SCHEDULES[method](list(range(workers)), 1e6):
        told = [set(known) for known in heard]
        for source, target in zip(each.sources.tolist(), each.targets.tolist(), strict=True):
            assert source != target
            heard[target] |= told[source]
    assert all(known == set(range(workers)) for known in heard)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["ring", "direct"])
def test_a_large_sum_takes_what_the_bound_says(method: str, workers: int) -> None:
    size = 64e6
    bound = 2 * (workers - 1) / workers * size / HUNDRED_MBIT
    told = Clock(even(workers)).sum_s(method, size)
    assert told.seconds == pytest.approx(bound, rel=0.02)
    assert told.sent_bytes == pytest.approx(2 * (workers - 1) / workers * size)


@pytest.mark.parametrize("method", [name for name in SCHEDULES if name != "hierarchical"])
def test_no_sum_of_even_hosts_beats_the_bound(method: str) -> None:
    for workers in (2, 3, 4, 7, 8):
        bound = 2 * (workers - 1) / workers * 1e6 / HUNDRED_MBIT
        assert Clock(even(workers)).sum_s(method, 1e6).seconds >= 0.999 * bound


def test_small_sums_are_a_matter_of_rounds() -> None:
    clock = Clock(even(8, latency_s=1e-3))
    told = {name: clock.sum_s(name, 64).seconds for name in SCHEDULES}
    assert told["doubling"] == pytest.approx(3e-3, rel=0.01)
    assert told["direct"] == pytest.approx(2e-3, rel=0.01)
    assert told["ring"] == pytest.approx(14e-3, rel=0.01)
    assert told["tree"] == pytest.approx(6e-3, rel=0.01)


def test_one_server_is_limited_by_its_own_link() -> None:
    clock = Clock(even(4))
    assert clock.sum_s("server", 4e6).seconds > 3 * 4e6 / HUNDRED_MBIT
    assert clock.sum_s("server", 4e6).seconds > 1.9 * clock.sum_s("direct", 4e6).seconds


def test_workers_of_a_host_share_its_link_but_for_the_hierarchical_sum() -> None:
    apart, together = Clock(even(8)), Clock(even(8, per_host=4))
    assert together.sum_s("direct", 4e6).seconds > 2 * apart.sum_s("direct", 4e6).seconds
    told = {name: together.sum_s(name, 4e6).seconds for name in SCHEDULES}
    assert told["hierarchical"] == pytest.approx(4e6 / HUNDRED_MBIT, rel=0.1)
    assert told["hierarchical"] < told["direct"]


def test_a_ring_goes_at_the_speed_of_its_slowest_link() -> None:
    slow = with_slow_host(even(4), 3, 0.25)
    ratio = Clock(slow).sum_s("ring", 4e6).seconds / Clock(even(4)).sum_s("ring", 4e6).seconds
    assert ratio == pytest.approx(4, rel=0.05)


def test_a_slow_leaf_of_a_tree_costs_less_than_a_slow_root() -> None:
    leaf, root = (Clock(with_slow_host(even(4), host, 0.25)) for host in (3, 0))
    assert leaf.sum_s("tree", 4e6).seconds < 0.7 * root.sum_s("tree", 4e6).seconds


def test_a_connection_used_both_ways_slows_pairs_and_not_rings() -> None:
    figures = even(4).model_copy(update={"both_ways": 0.7})
    plain, both = Clock(even(4)), Clock(figures)
    assert both.sum_s("ring", 4e6) == plain.sum_s("ring", 4e6)
    ratio = both.sum_s("doubling", 4e6).seconds / plain.sum_s("doubling", 4e6).seconds
    assert ratio == pytest.approx(1 / 0.7, rel=0.01)


def test_encoded_sums_take_their_bytes_and_what_packing_takes() -> None:
    clock = Clock(even(4))
    dense, packed = clock.sum_s("direct", 4e6), clock.compressed_s(CODECS[1], 4e6)
    packing = 1e6 * (1 + 1 / 4) * 1e-9 + 1e6 * 1.5 * 1e-9
    assert packed.sent_bytes == pytest.approx(dense.sent_bytes / 4)
    assert packed.seconds == pytest.approx(dense.seconds / 4 + packing, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(2, 9),
    method=st.sampled_from(sorted(SCHEDULES)),
    size=st.floats(1, 1e8),
    factor=st.floats(1.0, 8.0),
)
def test_faster_links_never_take_longer(
    workers: int, method: str, size: float, factor: float
) -> None:
    rounds = SCHEDULES[method](list(range(workers)), size)
    slow, fast = even(workers), even(workers, bytes_per_s=HUNDRED_MBIT * factor)
    assert elapse(fast, rounds) <= elapse(slow, rounds) * (1 + 1e-9)


def test_sums_hide_behind_the_backward_pass_as_its_gradients_come() -> None:
    clock = Clock(even(4, bytes_per_s=1e9))
    one = forecast(clock, language_model(), MethodSetting(method="ring"))
    many = forecast(clock, language_model(), MethodSetting(method="ring", bucket_bytes=400_000))
    assert one.hidden_s == pytest.approx(0, abs=1e-12)
    assert many.hidden_s > 0.5 * many.exchange_s
    assert many.step_s < one.step_s
    last = clock.sum_s("ring", 400_000).seconds
    assert many.step_s >= 0.05 + 0.999 * last
    alone = forecast(
        clock, language_model(hides=0.0), MethodSetting(method="ring", bucket_bytes=400_000)
    )
    assert alone.step_s == pytest.approx(0.05 + alone.exchange_s)


def test_local_methods_exchange_now_and_then() -> None:
    clock = Clock(even(4))
    each = forecast(clock, language_model(), MethodSetting(method="local", every=1))
    rare = forecast(clock, language_model(), MethodSetting(method="local", every=8))
    later = forecast(clock, language_model(), MethodSetting(method="local", every=8, delay_steps=1))
    assert rare.bytes_per_step == pytest.approx(each.bytes_per_step / 8)
    assert rare.step_s == pytest.approx(0.05 + (each.step_s - 0.05) / 8)
    assert rare.step_s - later.step_s == pytest.approx(0.05 / 8)
    assert 1 < rare.steps_factor < later.steps_factor


def test_nobody_waits_for_a_straggler_without_synchrony() -> None:
    figures = even(4, bytes_per_s=1e9).model_copy(update={"compute_s": (0.05, 0.05, 0.05, 0.2)})
    clock = Clock(figures)
    waited = forecast(clock, language_model(), MethodSetting(method="ring"))
    free = forecast(clock, language_model(), MethodSetting(method="asynchronous"))
    assert waited.step_s > 0.2
    assert free.step_s < 0.08


def test_onebit_begins_with_more_bits_and_for_as_long_as_adam_remembers() -> None:
    clock = Clock(even(4))
    one, four = (MethodSetting(method="direct", codec=codec) for codec in ("onebit", "int4"))

    def sent(setting: MethodSetting, steps: int) -> float:
        work = language_model(steps=steps, memory_steps=1000)
        return forecast(clock, work, setting).bytes_per_step

    assert sent(one, 300) == sent(one, 1000) == sent(four, 300)
    assert sent(four, 300) / 2 > sent(one, 10_000) > sent(one, 1_000_000) * 0.99


@pytest.mark.parametrize(
    ("setting", "low", "high"),
    [
        (MethodSetting(method="direct", codec="fp16"), 1.6, 2.0),
        (MethodSetting(method="direct", codec="int8"), 2.6, 3.2),
        (MethodSetting(method="local", codec="int4", every=4), 5.5, 7.5),
        (MethodSetting(method="diloco", every=100), 3.3, 5.5),
    ],
)
def test_the_table_that_the_guesses_were_set_by_still_comes_out(
    setting: MethodSetting, low: float, high: float
) -> None:
    """Times to a loss on 4 hosts, over dense. Guards against slips; compute and guesses were fitted to it."""
    work = language_model(backward_s=0.0, steps=1000)
    clock = Clock(even(4))
    plain = forecast(clock, work, MethodSetting(method="all-reduce"))
    told = forecast(clock, work, setting)
    assert low < plain.cost_s / told.cost_s < high


def test_buckets_keep_the_order_and_all_bytes() -> None:
    work = SharedWork(gradient_bytes=(10, 10, 50, 5, 5), compute_s=1, backward_s=0.5)
    assert split_buckets(work, 20) == (20, 50, 10)
    assert sum(split_buckets(work, 7)) == work.bytes


def test_figures_must_fit_their_hosts() -> None:
    good = even(3).model_dump()
    with pytest.raises(ValueError, match="between 3 hosts"):
        WireFigures.model_validate({**good, "latency_s": ((0.0,),)})
    with pytest.raises(ValueError, match="above 0"):
        WireFigures.model_validate({**good, "send_bytes_per_s": (1.0, 0.0, math.nan)})
