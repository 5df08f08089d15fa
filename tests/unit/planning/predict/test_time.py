"""Seconds of a step: parts add up, limits hold, and more of anything costs what it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.planning.predict.constants import (
    NAMES,
    OF_EXPERTS,
    PRIORS,
    STACKS,
    make_constants,
    shipped_constants,
)
from yunlu.planning.predict.query_batch import (
    PRECISIONS,
    RECOMPUTE,
    QueryBatch,
    concatenate,
    make_queries,
)
from yunlu.planning.predict.step_time import step_time

A_MODEL = {
    "layers": 32.0,
    "hidden": 4096.0,
    "heads": 32.0,
    "kv_heads": 32.0,
    "head_dim": 128.0,
    "ffn": 11008.0,
    "gated": 1.0,
    "vocab": 32000.0,
    "tied": 0.0,
    "causal": 1.0,
    "experts": 1.0,
    "active_experts": 1.0,
    "parameters": 6.74e9,
    "active_parameters": 6.61e9,
    "trainable": 6.74e9,
    "base_bytes": 2.0,
    "flops_per_token": 6 * 6.61e9 + 6 * 32 * 4096 * 4096.0,
}
AN_A100 = {
    "precision": PRECISIONS.index("bf16"),
    "peak_flops": 312e12,
    "memory_bytes": 80e9,
    "memory_bytes_per_s": 2.0e12,
    "link_bytes_per_s": 300e9,
    "node_devices": 8.0,
    "network_bytes_per_s": 25e9,
    "stack": STACKS.index("unknown"),
}


def points(count: int = 1, **columns: object) -> QueryBatch:
    given_ = {
        **A_MODEL,
        **AN_A100,
        "seq": 4096.0,
        "batch": 64.0,
        "micro_batch": 1.0,
        "dp": 1.0,
        "fsdp": 1.0,
        "zero": 0.0,
        "tp": 1.0,
        "sequence": 0.0,
        "pp": 1.0,
        "virtual": 1.0,
        "cp": 1.0,
        "ep": 1.0,
        "recompute": 0.0,
        **columns,
    }
    made = make_queries(count, devices=1.0, **given_)
    return made.with_columns(devices=made.dp * made.fsdp * made.tp * made.pp * made.cp)


def test_one_device_computes_at_a_plausible_share_of_its_peak() -> None:
    asked = points()
    pace = asked.batch * asked.seq / (step_time(asked).total_s * asked.devices)
    share = pace * asked.flops_per_token / asked.peak_flops
    assert 0.3 < share[0] < 0.75


def test_one_device_sends_nothing_and_waits_for_nobody() -> None:
    time = step_time(points())
    sent = [time.tp_s[0], time.pp_bubble_s[0], time.dp_s[0]]
    assert sent == pytest.approx([0, 0, 0], abs=1e-9)


def seconds(stack: str, **columns: object) -> float:
    asked = points(stack=STACKS.index(stack), **columns)
    return float(step_time(asked, make_constants({}, {})).total_s[0])


def test_traits_tell_stacks_apart_before_any_measurement() -> None:
    usual = seconds("fms-fsdp", seq=32768.0)
    assert seconds("llm-foundry", seq=32768.0) > usual  # eager, the first flash kernel
    assert seconds("yunlu", seq=32768.0) > usual  # eager, but a kernel of today
    assert seconds("yunlu", seq=32768.0) < seconds("llm-foundry", seq=32768.0)
    hopper = {"peak_flops": 989e12, "seq": 32768.0}
    assert seconds("megatron-bridge", **hopper) < seconds("fms-fsdp", **hopper)


def test_software_that_is_unknown_runs_operator_by_operator() -> None:
    order = [
        seconds(stack, seq=8192.0)
        for stack in ("fms-fsdp", "unknown", "unknown-flash-1", "unknown-scores")
    ]
    assert order == sorted(order)
    assert order[0] < order[1]
    assert seconds("unknown") < seconds("unknown-norms")


def test_messages_travel_while_operators_are_launched() -> None:
    slow = make_constants({"launch_s": 10.0}, {})
    alone, cut = (float(step_time(points(tp=ways), slow).total_s[0]) for ways in (1.0, 2.0))
    assert cut == pytest.approx(alone, rel=1e-3)


def test_selective_recomputation_repeats_what_the_stack_says() -> None:
    selective = float(RECOMPUTE.index("selective"))
    extra = {
        stack: seconds(stack, recompute=selective) / seconds(stack)
        for stack in ("torchtitan", "unknown")
    }
    # Half of the products of a forward pass against attention alone.
    assert 1.1 < extra["torchtitan"] < 1.25
    assert 1.0 < extra["unknown"] < 1.1


def routed(**columns: float) -> QueryBatch:
    """Tokens choose 8 of 64 experts, each an eighth as wide: as much work as the dense model."""
    return points(1, experts=64.0, active_experts=8.0, parameters=4e10, trainable=4e10, **columns)


def test_experts_cost_more_than_their_flops_and_most_across_nodes() -> None:
    dense = step_time(points(dp=16.0), make_constants({}, {})).total_s[0]
    alone, near, far = (
        step_time(routed(dp=16.0, ep=ep), make_constants({}, {})).total_s[0]
        for ep in (1.0, 8.0, 16.0)
    )
    assert dense < alone < near < far


def test_constants_of_experts_leave_dense_models_alone() -> None:
    other = make_constants({name: 2 * PRIORS[name].value for name in OF_EXPERTS}, {})
    for asked, changes in ((points(), False), (routed(ep=1.0), True)):
        usual, changed = (step_time(asked, c).total_s[0] for c in (make_constants({}, {}), other))
        assert (usual != changed) == changes


def test_four_byte_activations_take_longer() -> None:
    wide = seconds("unknown", precision=PRECISIONS.index("fp32"))
    assert wide > seconds("unknown")


@settings(max_examples=60, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 8, 64]),
    tp=st.sampled_from([1, 2, 8, 16]),
    pp=st.sampled_from([1, 2, 4, 8]),
    zero=st.sampled_from([0, 1, 3]),
    micro=st.sampled_from([1, 4]),
    recompute=st.sampled_from(range(len(RECOMPUTE))),
    stack=st.sampled_from(range(len(STACKS))),
)
def test_parts_are_finite_never_negative_and_add_up(
    *, dp, tp, pp, zero, micro, recompute, stack
) -> None:
    fsdp = dp if zero == 3 else 1
    time = step_time(
        points(
            dp=dp / fsdp,
            fsdp=fsdp,
            zero=zero,
            tp=tp,
            pp=pp,
            micro_batch=micro,
            batch=64.0 * dp,
            recompute=recompute,
            stack=stack,
        )
    )
    parts = [getattr(time, name)[0] for name in time.__slots__]
    assert all(np.isfinite(parts))
    assert min(parts) >= -1e-9 * time.total_s[0]
    assert sum(parts) == pytest.approx(time.total_s[0])


def test_full_recompute_costs_up_to_a_third_more_compute() -> None:
    none, full = step_time(points(2, recompute=[0.0, 2.0])).compute_s
    assert 1.2 < full / none < 4 / 3 + 1e-9


def test_frozen_weights_need_a_third_less_of_the_products() -> None:
    lora = points(trainable=2e7, flops_per_token=4 * 6.61e9 + 6 * 32 * 4096 * 4096.0)
    ratio = step_time(lora).compute_s[0] / step_time(points()).compute_s[0]
    assert 0.6 < ratio < 0.9


def test_more_micro_batches_make_the_bubble_a_smaller_share() -> None:
    time = step_time(points(3, pp=8.0, batch=[8.0, 64.0, 512.0]))
    share = time.pp_bubble_s / time.total_s
    assert share[0] > share[1] > share[2]


def test_interleaved_stages_wait_less() -> None:
    plain, interleaved = step_time(points(2, pp=8.0, virtual=[1.0, 4.0], batch=32.0)).pp_bubble_s
    assert interleaved < plain


def test_shards_across_a_slow_network_are_gathered_in_the_open() -> None:
    fast, slow = step_time(
        points(2, fsdp=64.0, zero=3.0, batch=64.0, network_bytes_per_s=[50e9, 1e9])
    ).dp_s
    assert slow > 5 * fast


def test_matrices_cut_beyond_a_node_are_slower() -> None:
    inside, beyond = step_time(points(2, tp=[8.0, 16.0])).tp_s
    assert beyond > 2 * inside


def test_many_points_are_as_one_by_one() -> None:
    count = 20_000
    generator = np.random.default_rng(0)
    many = points(
        count,
        micro_batch=generator.integers(1, 9, count).astype(float),
        tp=2.0 ** generator.integers(0, 4, count),
        stack=generator.integers(0, len(STACKS), count).astype(float),
    )
    total = step_time(many).total_s
    for place in (0, 8191, 8192, count - 1):
        alone = step_time(many.take(np.array([place]))).total_s[0]
        assert total[place] == pytest.approx(alone, rel=1e-12)


def test_departures_of_a_stack_touch_no_other() -> None:
    mine = make_constants({"gemm_share": 0.8}, {"yunlu": {"gemm_share": -0.5}})
    usual = make_constants({"gemm_share": 0.8}, {})
    both = points(2, stack=[STACKS.index("yunlu"), STACKS.index("unknown")])
    changed, same = step_time(both, mine).total_s / step_time(both, usual).total_s
    assert changed > 1.3
    assert same == 1.0


def test_shipped_constants_are_near_what_physics_says() -> None:
    shared = shipped_constants().values[STACKS.index("unknown")]
    before = make_constants({}, {}).values[STACKS.index("unknown")]
    for name, value, prior in zip(NAMES, shared, before, strict=True):
        if prior > 0:
            assert abs(np.log(value / prior)) < 4 * PRIORS[name].spread, name


def test_a_measured_share_of_the_peak_slows_a_device_that_reaches_less() -> None:
    whole, half = step_time(points(2, reachable=[0.87, 0.435])).compute_s
    assert half > 1.5 * whole


def test_points_with_and_without_a_measured_share_join() -> None:
    joined = concatenate([points(), points(reachable=0.8)])
    assert joined.reachable is not None
    assert np.isnan(joined.reachable[0])
