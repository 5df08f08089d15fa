"""A probe's figures, what follows from them for operators of any size, and the guess made of both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.test_planner import job, machine, profile
from yunlu.planning.analytic_estimate import contention, make_estimate, measured_with, name_work
from yunlu.planning.calibration import Z_80, Calibration, RunMeasurement, learn
from yunlu.planning.machine_profile import (
    KernelTiming,
    LinkFigures,
    MachineProfile,
    StartFigures,
    choose_profile,
    dump_profiles,
    file_names,
    fit_message_time,
    make_monotonic,
    parse_profiles,
    read_processor,
    with_profile,
)
from yunlu.planning.plan import Plan
from yunlu.planning.planner import make_plan
from yunlu.planning.predict.local import (
    Operators,
    OperatorWork,
    Pass,
    enlarge,
    operators_s,
    pass_s,
    update_operators,
)


def pace(
    kind: str = "product", threads: int = 1, *, rate: float = 1e9, call_s: float = 1e-6
) -> KernelTiming:
    sizes = (1e3, 1e6, 1e9)
    seconds = tuple(call_s + size / rate for size in sizes)
    fields = {"kind": kind, "threads": threads, "sizes": sizes, "seconds": seconds, "spread": 0.1}
    return KernelTiming.model_validate(fields)


def probe(**changes: object) -> MachineProfile:
    fields: dict[str, object] = {
        "at": 1.0, "took_s": 20.0, "is_quick": False, "host": "here", "kind": "cpu",
        "device": "test", "cores": 4, "memory_bytes": 1 << 34, "threads": 4, "torch": "2",
        "paces": (pace(), pace("product", 4, rate=4e9), pace("stream", rate=1e10)),
        "memory_bytes_per_s": 1e10, "call_s": 1e-5,
    }  # fmt: skip
    return MachineProfile.model_validate(fields | changes)


WORK = OperatorWork(
    passed=Pass(
        samples=32,
        operators=(
            Operators(kind="product", calls=10, size=1e7),
            Operators(kind="stream", calls=20, size=1e5),
            Operators(kind="stream", calls=5, size=0.0),
        ),
    ),
    update=update_operators("fused", gradient_bytes=4e6, state_bytes=8e6, tensors=12),
    gradient_bytes=4e6,
    trained_tensors=12,
)


@given(st.floats(1.0, 1e12), st.floats(1.0, 10.0))
def test_more_never_takes_less_time(size: float, times: float) -> None:
    curve = pace()
    assert curve.seconds_at(size * times) >= curve.seconds_at(size) * (1 - 1e-12)


def test_measured_sizes_are_given_back_and_larger_ones_grow_in_proportion() -> None:
    curve = pace()
    np.testing.assert_allclose(curve.seconds_at(np.array(curve.sizes)), curve.seconds, rtol=1e-12)
    assert curve.seconds_at(5e9) == pytest.approx(5 * curve.seconds[-1])
    assert curve.seconds_at(1.0) == pytest.approx(curve.call_s)


def test_a_probe_is_read_back_and_a_torn_file_holds_none() -> None:
    stored = dump_profiles([probe()])
    assert parse_profiles(stored) == (probe(),)
    assert parse_profiles(stored[:-9]) == ()
    assert parse_profiles(stored.replace(b'"version": 1', b'"version": 2')) == ()


@pytest.mark.parametrize(
    "broken",
    [
        {"sizes": (1.0, 2.0)},
        {"sizes": (2.0, 1.0, 3.0)},
        {"sizes": (), "seconds": ()},
        {"seconds": (0.0, 1.0, 2.0)},
        {"seconds": (1.0, math.inf, 2.0)},
    ],
)
def test_a_probe_with_a_broken_curve_is_left_out_and_the_others_stay(
    broken: dict[str, Any],
) -> None:
    bad = probe(torch="1").model_copy(update={"paces": (pace().model_copy(update=broken),)})
    assert parse_profiles(dump_profiles([bad, probe()])) == (probe(),)
    assert parse_profiles(dump_profiles([probe().model_copy(update={"call_s": 0.0})])) == ()
    assert parse_profiles("[]") == parse_profiles('{"probes": 3}') == ()


def test_threads_that_seem_slower_than_one_are_taken_to_be_no_slower() -> None:
    one, disturbed, fast = pace(), pace(threads=4, rate=1e8), pace("stream", threads=4, rate=4e9)
    found = make_monotonic([one, disturbed, pace("stream"), fast])
    assert found[1] == one.model_copy(update={"threads": 4})
    assert found[3] == fast


def test_a_machine_is_known_by_its_processor_not_by_its_containers_name() -> None:
    said = "processor : 0\nmodel name\t: Fast CPU @ 2.10GHz\nmodel name\t: Fast CPU @ 2.10GHz\n"
    assert read_processor(said) == "Fast CPU @ 2.10GHz"
    assert read_processor("") == ""
    name, _ = file_names("Fast CPU @ 2.10GHz", "3f2a91c0")
    assert name == file_names("Fast CPU @ 2.10GHz", "77be0d12")[0] == "fast-cpu-2-10ghz.json"


def test_a_new_probe_replaces_its_like_but_a_quick_one_never_a_whole_one() -> None:
    old, new = probe(at=1.0), probe(at=2.0)
    quick, other = probe(at=3.0, is_quick=True), probe(torch="3")
    assert with_profile([old, other], new) == (other, new)
    assert with_profile([old], quick) == (old,)
    assert with_profile([quick], old) == (old,)


def test_the_probe_of_the_installed_torch_and_an_accelerator_come_first() -> None:
    old, new = probe(at=1.0), probe(torch="3", at=2.0)
    gpu = probe(kind="cuda", device="T4", at=0.0)
    assert choose_profile([old, new], torch="2") == choose_profile([old, new], torch="2+cpu") == old
    assert choose_profile([old, new]) == new
    assert choose_profile([old, gpu, new], torch="2") == gpu
    assert choose_profile([]) is None


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_latency_and_bandwidth_are_found_again(message_s: float, bytes_per_s: float) -> None:
    sizes = [1e3, 1e5, 1e6, 1e7, 1e8]
    found = fit_message_time(sizes, [message_s + size / bytes_per_s for size in sizes])
    for size in sizes:
        expected = message_s + size / bytes_per_s
        assert found.message_s + size / found.bytes_per_s == pytest.approx(expected, rel=1e-3)


def test_neither_latency_nor_bandwidth_falls_below_zero() -> None:
    falling = fit_message_time([1e3, 1e6], [2e-3, 1e-3])
    assert falling.message_s > 0
    assert falling.bytes_per_s > 0
    steep = fit_message_time([1e3, 1e4, 1e5], [1e-9, 1e-5, 1e-3])
    assert steep.message_s == 0


def test_operators_cost_their_calls_and_what_their_curve_says() -> None:
    probed = probe()
    one = Operators(kind="product", calls=3, size=1e9)
    expected = 3 * (probed.call_s + probed.paces[0].seconds[-1] - probed.paces[0].call_s)
    assert operators_s((one,), probed, threads=1) == pytest.approx(expected)
    assert operators_s((one,), probed, threads=4) < expected / 3
    views = Operators(kind="stream", calls=7, size=0.0)
    assert operators_s((views,), probed, threads=1) == pytest.approx(7 * probed.call_s)


def test_an_accelerator_works_while_it_is_called() -> None:
    gpu = probe(kind="cuda")
    large, many = (
        Operators(kind="product", calls=1, size=1e9),
        Operators(kind="stream", calls=1000, size=0.0),
    )
    alone = operators_s((large,), gpu, threads=1), operators_s((many,), gpu, threads=1)
    assert operators_s((large, many), gpu, threads=1) < sum(alone)
    assert operators_s((large, many), gpu, threads=1) >= max(alone)


def test_what_was_not_measured_is_taken_for_its_nearest_like() -> None:
    probed = probe()
    for kind, like in (("convolution_back", "product"), ("random", "stream")):
        asked = (Operators(kind=kind, calls=1, size=1e8),)
        same = (Operators(kind=like, calls=1, size=1e8),)
        found = operators_s(asked, probed, threads=1, precision="fp8")
        assert found == operators_s(same, probed, threads=1)


def test_a_mixed_model_slows_convolutions_and_others_apart() -> None:
    both = (
        Operators(kind="product", calls=1, size=1e9),
        Operators(kind="convolution", calls=1, size=1e9),
    )
    alone = operators_s(both, probe(), threads=1)
    slower = operators_s(both, probe(mixed_convolutions=3.0), threads=1)
    assert slower == pytest.approx(2 * alone, rel=0.01)


def test_more_samples_make_operators_larger_not_more() -> None:
    larger = enlarge(WORK.passed.operators, 4.0)
    assert [each.calls for each in larger] == [10, 20, 5]
    assert Pass(samples=128, operators=larger).flops == 4 * WORK.passed.flops


def test_an_update_moves_the_gradient_once_and_all_else_twice() -> None:
    fused = update_operators("fused", gradient_bytes=4.0, state_bytes=8.0, tensors=3)
    assert (fused.calls, fused.size) == (1, 28.0)
    single = update_operators("single", gradient_bytes=4.0, state_bytes=8.0, tensors=3)
    assert (
        single.calls
        > update_operators("foreach", gradient_bytes=4.0, state_bytes=8.0, tensors=3).calls
    )


START = StartFigures(torch_s=2.0, worker_s=3.0, cpu_s=1.5, resident_bytes=2e8)


def planned(
    calibration: Calibration | None = None,
    *,
    busy: float = 1.0,
    workers: int = 1,
    start: StartFigures | None = START,
    **train: object,
) -> Plan:
    asked, measured = job(**train), profile()
    guess = make_estimate(
        measured, WORK, probe(start=start), calibration or Calibration(),
        name=name_work(asked), busy=busy, workers=workers,
    )  # fmt: skip
    return make_plan(asked, machine(dollars_per_hour=2.0), measured, guess)


def test_a_plan_carries_its_prediction_which_uses_no_timed_pass() -> None:
    plan = planned()
    estimate = plan.estimate
    assert estimate is not None
    slow = make_plan(
        job(), machine(), profile(probe_s=5.0, update_s=5.0, load_s_per_sample=5.0),
        make_estimate(profile(probe_s=5.0), WORK, probe(), Calibration(), name=estimate.work),
    )  # fmt: skip
    assert slow.estimate is not None
    assert slow.estimate.step_s == pytest.approx(estimate.step_s)
    assert slow.prediction.step_s > 100 * plan.prediction.step_s
    passes_s = pass_s(WORK.passed, probe(), threads=2)
    assert passes_s < estimate.step_s < 2 * passes_s
    for quantity, (low, high) in estimate.intervals.items():
        assert low < getattr(estimate, quantity) < high
    assert set(estimate.intervals) == {
        "memory_bytes",
        "step_s",
        "samples_per_s",
        "total_s",
        "dollars",
    }
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_totals_interval_knows_that_start_up_is_not_known() -> None:
    estimate = planned(steps=1, evaluate="never").estimate
    assert estimate is not None
    low, high = estimate.intervals["total_s"]
    assert math.log(high / estimate.total_s) > 0.8 * Z_80 * 0.3 * 3.0 / estimate.total_s
    assert low < estimate.total_s - 3.0 * (1 - math.exp(-Z_80 * 0.3)) + 1e-9


@pytest.mark.parametrize("why", ["a quick look", "a worker group"])
def test_where_start_up_was_not_probed_no_total_is_predicted(why: str) -> None:
    plan = planned(workers=2) if why == "a worker group" else planned(start=None)
    assert plan.estimate is not None
    assert set(plan.estimate.intervals) == {"memory_bytes", "step_s", "samples_per_s"}


def test_a_group_learns_no_memory_and_no_certainty_from_single_workers() -> None:
    before = planned(workers=2).estimate
    assert before is not None
    figures = [
        RunMeasurement(
            run=f"r{i}", at=0.0, device=before.device, stack=before.stack, precision="fp32",
            work=before.work, predicted=1.0, measured=1.5, quantity=quantity,
        )
        for i in range(8)
        for quantity in ("step_s", "memory_bytes")
    ]  # fmt: skip
    after = planned(learn(Calibration(), figures), workers=2).estimate
    assert after is not None
    assert after.intervals["memory_bytes"] == before.intervals["memory_bytes"]
    (low, high), (wide_low, wide_high) = after.intervals["step_s"], before.intervals["step_s"]
    assert high / low == pytest.approx(wide_high / wide_low)


def test_without_an_analytic_estimate_nothing_is_predicted_and_old_plans_are_read() -> None:
    plan = make_plan(job(), machine(), profile())
    assert plan.estimate is None
    written = plan.model_dump(mode="json")
    del written["estimate"]
    assert Plan.model_validate(written).estimate is None


def test_earlier_runs_correct_predictions_but_not_what_they_are_compared_with() -> None:
    before = planned().estimate
    assert before is not None
    figures = [
        RunMeasurement(
            run=f"r{i}", at=0.0, device=before.device, stack=before.stack, precision="fp32",
            work=before.work, predicted=1.0, measured=1.5,
        )
        for i in range(8)
    ]  # fmt: skip
    after = planned(learn(Calibration(), figures)).estimate
    assert after is not None
    assert after.raw == before.raw
    assert after.step_s == pytest.approx(1.5 * before.step_s, rel=0.05)
    assert after.runs == 8
    (low, high), (wide_low, wide_high) = after.intervals["step_s"], before.intervals["step_s"]
    assert high / low < wide_high / wide_low


def test_others_on_the_machine_slow_the_run_down_and_make_it_less_sure() -> None:
    assert contention(0.0, cores=2, threads=2) == 1.0
    assert contention(5.0, cores=2, threads=1) == 3.0
    quiet, busy = planned().estimate, planned(busy=3.0).estimate
    assert quiet is not None
    assert busy is not None
    assert busy.step_s == pytest.approx(3 * quiet.step_s)
    assert math.log(busy.intervals["step_s"][1] / busy.step_s) > math.log(
        quiet.intervals["step_s"][1] / quiet.step_s
    )


def test_the_probed_link_is_what_replicas_are_planned_with() -> None:
    slow = fit_message_time([1e3, 1e6], [1.0, 1.1])
    probed = probe(link=LinkFigures(backend="gloo", all_reduce=slow, send=slow))
    asked = job().model_copy(update={"devices": 2})
    usual = make_plan(asked, machine(), measured_with(profile(), None, probe()))
    found = make_plan(asked, machine(), measured_with(profile(), None, probed))
    assert not found.layout.is_single
    assert found.prediction.step_s > usual.prediction.step_s + 1


def test_works_are_told_apart_by_model_data_and_batch_not_by_length() -> None:
    assert name_work(job(epochs=1)) == name_work(job(epochs=9))
    assert name_work(job(batch=8)) != name_work(job(batch=16))
