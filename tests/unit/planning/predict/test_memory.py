"""Peak memory: known models by hand, and what must hold for any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.memory import (
    StateBytes,
    cannot_run,
    fits,
    peak_memory,
    reported_memory,
)
from yunlu.planning.predict.query_batch import QueryBatch, make_queries

EIGHT_B: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336,
    "gated": 1, "vocab": 128256, "tied": 0, "causal": 1, "experts": 1, "active_experts": 1,
    "parameters": 8.03e9, "active_parameters": 7.5e9, "trainable": 8.03e9, "base_bytes": 2,
    "flops_per_token": 5e10, "seq": 4096, "batch": 64, "micro_batch": 1, "devices": 8, "dp": 8,
    "fsdp": 1, "zero": 0, "tp": 1, "sequence": 0, "pp": 1, "virtual": 1, "cp": 1, "ep": 1,
    "recompute": 0, "precision": 3, "peak_flops": 989e12, "memory_bytes": 85.5e9,
    "memory_bytes_per_s": 3.35e12, "link_bytes_per_s": 450e9, "node_devices": 8,
    "network_bytes_per_s": 50e9, "stack": 0,
}  # fmt: skip


def point(**changes: Any) -> QueryBatch:
    return make_queries(1, **{**EIGHT_B, **changes})


def total(**changes: Any) -> float:
    return float(peak_memory(point(**changes)).total[0])


@pytest.mark.parametrize(
    ("stack", "each"),
    [("megatron-bridge", 18), ("unknown", 16)],  # gradients are kept wide, or as the weights
)
def test_states_of_mixed_precision_take_so_many_bytes_per_weight(stack: str, each: int) -> None:
    memory = peak_memory(point(stack=STACKS.index(stack)))
    states = memory.weights + memory.gradients + memory.optimizer
    assert states[0] / 8.03e9 == pytest.approx(each, rel=0.05)


def test_full_precision_takes_sixteen_bytes_per_weight_and_twice_the_activations() -> None:
    full, half = peak_memory(point(precision=0)), peak_memory(point())
    assert (full.weights + full.gradients + full.optimizer)[0] == pytest.approx(16 * 8.03e9)
    assert full.activations[0] == pytest.approx(2 * half.activations[0])


def test_each_stage_of_zero_shares_out_one_thing_more() -> None:
    parts = [peak_memory(point(zero=stage)) for stage in range(4)]
    for stage, name in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        before, after = getattr(parts[stage - 1], name)[0], getattr(parts[stage], name)[0]
        assert after == pytest.approx(before / 8)
    assert parts[3].buffers[0] > 0, "whole blocks are gathered"


def test_sharding_fully_is_zero_3_and_copies_of_shards_save_nothing() -> None:
    assert total(dp=1, fsdp=8, zero=3) == pytest.approx(total(dp=8, zero=3))
    assert total(dp=4, fsdp=8, zero=3) == pytest.approx(total(dp=1, fsdp=8, zero=3), rel=0.01)


def test_tensor_parallelism_cuts_the_rest_only_with_the_sequence() -> None:
    whole, cut = peak_memory(point(tp=8)), peak_memory(point(tp=8, sequence=1))
    alone = peak_memory(point())
    assert whole.weights[0] == pytest.approx(alone.weights[0] / 8)
    assert alone.activations[0] / 8 == pytest.approx(cut.activations[0])
    assert cut.activations[0] < whole.activations[0] < alone.activations[0]


def test_first_stage_of_a_pipeline_holds_a_pass_for_each_stage() -> None:
    # Four stages of eight blocks, four passes in flight: as much as all blocks of one pass.
    plain = peak_memory(point(pp=4, dp=2), stage="reported")
    edge = peak_memory(point(layers=0.001)).activations[0]
    assert plain.activations[0] - edge == pytest.approx(
        peak_memory(point()).activations[0] - edge, rel=0.02
    )
    few = peak_memory(point(pp=4, dp=2, batch=2), stage="reported")
    assert few.activations[0] < 0.5 * plain.activations[0], "one micro-batch, one pass in flight"
    more = peak_memory(point(pp=4, dp=2, virtual=2), stage="reported")
    assert more.activations[0] > plain.activations[0]


def test_logits_sit_on_the_last_stage_and_can_make_it_the_worst() -> None:
    memory = peak_memory(point(pp=8, dp=1, batch=8, micro_batch=8, recompute=2))
    assert memory.logits[0] > 0
    assert (
        memory.total[0]
        > peak_memory(point(pp=8, dp=1, batch=8, micro_batch=8, recompute=2, vocab=1)).total[0]
    )


def test_recomputing_more_keeps_less() -> None:
    kept = [peak_memory(point(recompute=mode)).activations[0] for mode in range(3)]
    assert kept[0] > kept[1] > kept[2]


def test_adapters_train_little_over_a_frozen_base() -> None:
    lora = peak_memory(point(trainable=2e7))
    quantised = peak_memory(point(trainable=2e7, base_bytes=0.55))
    assert lora.weights[0] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert quantised.weights[0] == pytest.approx(0.55 * 8.03e9, rel=0.02)
    assert lora.optimizer[0] < 1e9


def test_all_experts_are_stored_and_expert_parallelism_divides_them() -> None:
    experts = {
        "experts": 8,
        "active_experts": 2,
        "ffn": 28672,
        "parameters": 46.7e9,
        "trainable": 46.7e9,
    }
    whole, spread = peak_memory(point(**experts)), peak_memory(point(**experts, ep=8))
    assert whole.weights[0] == pytest.approx(2 * 46.7e9, rel=0.05)
    assert spread.weights[0] < 0.2 * whole.weights[0]


def test_bytes_of_another_optimiser_replace_those_of_the_stack() -> None:
    memory = peak_memory(point(), state=StateBytes(optimizer=4.0))
    assert memory.optimizer[0] == pytest.approx(4 * 8.03e9)


def test_a_measured_model_keeps_what_was_measured() -> None:
    kept = 1e9
    memory = peak_memory(point(activation_bytes=kept, precision=0, micro_batch=4, vocab=0))
    assert memory.activations[0] == pytest.approx(4 * kept)


def test_more_stages_than_blocks_cannot_run() -> None:
    assert cannot_run(point(pp=64))[0]
    assert not cannot_run(point(pp=32))[0]
    assert not fits(point(pp=64, memory_bytes=1e15), peak_memory(point(pp=64)))[0]


def test_nanotron_leaves_the_last_stages_empty_where_the_head_weighs_much() -> None:
    small = {
        "layers": 16, "hidden": 2048, "kv_heads": 32, "head_dim": 64, "ffn": 8192, "vocab": 131072,
        "tied": 1, "parameters": 1342177280, "stack": STACKS.index("nanotron"),
    }  # fmt: skip
    assert [bool(cannot_run(point(**small, pp=pp))[0]) for pp in (1, 2, 4, 8, 16)] == [
        *[False] * 4,
        True,
    ]


def test_measured_peaks_of_the_sweep_are_met() -> None:
    """Two rows of the nanotron sweep (Apache-2.0): 36.7 and 24.2 GiB."""
    one = {
        "layers": 16, "hidden": 2048, "kv_heads": 32, "head_dim": 64, "ffn": 8192, "vocab": 131072,
        "tied": 1, "parameters": 1342177280, "trainable": 1342177280, "batch": 256, "sequence": 0,
        "stack": STACKS.index("nanotron"),
    }  # fmt: skip
    for zero, measured in ((0, 36.7), (1, 24.2)):
        told = reported_memory(point(**one, zero=zero)).total[0] / 2**30
        assert told == pytest.approx(measured, rel=0.12)


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 16]),
    zero=st.integers(0, 3),
    micro=st.integers(1, 8),
    recompute=st.integers(0, 2),
    stack=st.integers(0, len(STACKS) - 1),
)
def test_parts_are_never_negative_and_splitting_never_needs_more(  # noqa: PLR0917
    tp: int, pp: int, dp: int, zero: int, micro: int, recompute: int, stack: int
) -> None:
    layout = {"tp": tp, "pp": pp, "dp": dp, "zero": zero, "micro_batch": micro,
              "recompute": recompute, "stack": stack, "batch": 256, "sequence": 1}  # fmt: skip
    memory = peak_memory(point(**layout))
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "framework")
    assert all(getattr(memory, name)[0] >= 0 for name in parts)
    assert memory.low[0] < memory.total[0] < memory.high[0]
    assert total(**{**layout, "tp": 2 * tp}) <= total(**layout) + 1e9
    assert total(**{**layout, "micro_batch": 2 * micro}) >= total(**layout) * (1 - 1e-12)


def test_chunks_and_mixed_stacks_change_nothing() -> None:
    count = 20000
    stacks = np.arange(count) % len(STACKS)
    many = peak_memory(make_queries(count, **{**EIGHT_B, "stack": stacks})).total
    for stack in range(len(STACKS)):
        assert many[stack] == pytest.approx(total(stack=stack))
        assert many[stack + 1000 * len(STACKS)] == many[stack]
