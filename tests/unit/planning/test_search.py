"""The search against a plain loop over the same space, and what must hold of whatever it finds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.planning.models.shape import ModelShape, columns_of, stages, tensor_ways
from yunlu.planning.predict.query_batch import PRECISIONS, QueryBatch, make_queries
from yunlu.planning.predict.step_time import step_time
from yunlu.planning.search.layout_search import (
    LAYOUT_COLUMNS,
    HardwareConfig,
    LayoutQuery,
    LayoutRules,
    TrainingWork,
    divisors,
    enumerate_layouts,
    node_counts,
    predict_memory,
    run_seconds,
    search,
)

SHAPE = ModelShape(
    name="small",
    kind="decoder",
    layers=6,
    hidden=1024,
    heads=8,
    kv_heads=4,
    ffn=4096,
    vocab=32000,
)
SEQ = 2048
A100 = HardwareConfig(
    device="A100",
    devices=4,
    domain=4,
    memory_bytes=40 * 2**30,
    memory_bytes_per_s=1.5e12,
    link_bytes_per_s=300e9,
    network_bytes_per_s=12e9,
    peak_flops={"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
)
T4 = HardwareConfig(
    device="T4",
    devices=1,
    domain=1,
    memory_bytes=15 * 2**30,
    memory_bytes_per_s=0.3e12,
    link_bytes_per_s=12e9,
    network_bytes_per_s=3e9,
    peak_flops={"fp16": 65e12, "fp32": 8e12},
)


def work(samples: float = 1e5) -> TrainingWork:
    return TrainingWork(samples=samples, seq=SEQ, columns=columns_of(SHAPE, SEQ), stack=1)


def rules(**changes: object) -> LayoutRules:
    plain = LayoutRules(batches=(16,), tensor_ways=tensor_ways(SHAPE), stages=stages(SHAPE))
    return replace(plain, **changes)  # type: ignore[arg-type]


def question(**changes: object) -> LayoutQuery:
    bound = rules(barred=frozenset({"fsdp", "tp", "pp"}), zero1=(False,))
    allowed = {"bf16": rules(), "fp16": bound, "tf32": rules(), "fp32": rules()}
    plain = LayoutQuery(work=work(), configs=(A100, T4), rules=allowed, most_devices=8)
    return replace(plain, **changes)  # type: ignore[arg-type]


def one_point(config: HardwareConfig, precision: str, devices: int, **layout: float) -> QueryBatch:
    return make_queries(
        1,
        **columns_of(SHAPE, SEQ),
        seq=SEQ,
        devices=devices,
        cp=1,
        ep=1,
        stack=1,
        precision=PRECISIONS.index(precision),
        peak_flops=config.peak_flops[precision],
        memory_bytes=config.memory_bytes,
        memory_bytes_per_s=config.memory_bytes_per_s,
        link_bytes_per_s=config.link_bytes_per_s,
        node_devices=config.domain,
        network_bytes_per_s=config.network_bytes_per_s,
        reachable=config.reachable,
        **layout,
    )


def best_by_loop(asked: LayoutQuery, config: HardwareConfig, nodes: int) -> float:
    """The least time of any layout that fits, each predicted on its own."""
    devices, least = nodes * config.devices, np.inf
    for precision, rule in asked.rules.items():
        if precision not in config.peak_flops:
            continue
        for tp, pp, fsdp in itertools.product(divisors(devices), repeat=3):
            if devices % (tp * pp * fsdp) or tp not in rule.tensor_ways or config.domain % tp:
                continue
            dp = devices // (tp * pp * fsdp)
            cut = {"fsdp": fsdp, "tp": tp, "pp": pp}
            if pp > rule.stages or dp * fsdp > 16 or any(cut[axis] > 1 for axis in rule.barred):
                continue
            micros = [1, 2, 4, 8, 16]
            zeros = [3] if fsdp > 1 else [0, 1] if dp > 1 and True in rule.zero1 else [0]
            virtuals = [each for each in (1, 2) if each * pp <= rule.stages] if pp > 1 else [1]
            for micro, recompute, zero, virtual in itertools.product(
                micros, range(3), zeros, virtuals
            ):
                if micro > 16 // (dp * fsdp):
                    continue
                if virtual > 1 and 16 // (dp * fsdp * micro) < pp:
                    continue
                point = one_point(
                    config, precision, devices, dp=dp, **cut, zero=zero, virtual=virtual, batch=16,
                    micro_batch=micro, recompute=recompute, sequence=float(tp > 1),
                )  # fmt: skip
                if (
                    predict_memory(point, asked.work).high[0]
                    > asked.memory_share * config.memory_bytes
                ):
                    continue
                run_s = run_seconds(asked.work, point, step_time(point).total_s)
                least = min(least, float(run_s[0]))
    return least


def test_stages_are_interleaved_only_where_micro_batches_fill_them() -> None:
    grid = enumerate_layouts(4, 4, rules(batches=(2,), stages=8, pinned={"pp": 4}))
    assert set(grid["virtual"]) == {1.0}
    grid = enumerate_layouts(4, 4, rules(batches=(8,), stages=8, pinned={"pp": 4}))
    passes = np.ceil(8 / grid["micro_batch"])
    assert set(grid["virtual"]) == {1.0, 2.0}
    assert passes[grid["virtual"] == 2.0].min() == 4
    said = rules(batches=(2,), stages=8, pinned={"pp": 4}, stages_per_rank=(2,))
    assert set(enumerate_layouts(4, 4, said)["virtual"]) == {2.0}


def test_the_search_finds_what_a_plain_loop_finds() -> None:
    asked = question()
    found = search(asked)
    run_s = run_seconds(asked.work, found.points, step_time(found.points).total_s)
    told = {
        (int(config), int(nodes)): float(seconds)
        for config, nodes, seconds in zip(found.config, found.nodes, run_s, strict=True)
    }
    for place, config in enumerate(asked.configs):
        # Three machines cannot share sixteen samples evenly: there the search looks at fewer layouts.
        for nodes in [each for each in node_counts(config, asked) if each % 3]:
            least = best_by_loop(asked, config, nodes)
            assert told.get((place, nodes), np.inf) == pytest.approx(least, rel=1e-12)
    assert len(told) >= 4


@settings(max_examples=30)
@given(
    devices=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]),
    domain=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 100),
)
def test_every_layout_uses_all_devices_and_gives_each_replica_work(
    devices: int, domain: int, batch: int
) -> None:
    grid = enumerate_layouts(devices, min(domain, devices), rules(batches=(batch,)))
    assert set(grid) == set(LAYOUT_COLUMNS)
    assert np.all(grid["dp"] * grid["fsdp"] * grid["tp"] * grid["pp"] == devices)
    replicas = grid["dp"] * grid["fsdp"]
    assert np.all(replicas <= batch)
    assert np.all(grid["micro_batch"] <= np.ceil(batch / replicas))
    assert np.all(min(domain, devices) % grid["tp"] == 0)
    assert np.all(SHAPE.kv_heads % grid["tp"] == 0)
    assert np.all(grid["pp"] * grid["virtual"] <= SHAPE.layers)
    assert np.all((grid["zero"] == 3) == (grid["fsdp"] > 1))
    rows = np.stack([grid[name] for name in LAYOUT_COLUMNS], axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows), "each layout stands once"


def test_what_is_found_fits_with_room_for_the_high_end() -> None:
    asked = question(most_devices=16)
    found = search(asked)
    held = predict_memory(found.points, asked.work).high
    assert np.all(held <= asked.memory_share * found.points.memory_bytes)
    assert np.all(found.points.devices <= 16)


def test_pins_are_kept() -> None:
    pinned = rules(pinned={"tp": 2, "pp": 1}, recompute=(2,), micro_batch=2)
    found = search(question(rules={"bf16": pinned}, nodes=2))
    (tp,), (recompute,) = found.points.tp, found.points.recompute
    assert (tp, recompute, found.points.micro_batch[0], found.nodes[0]) == (2, 2, 2, 2)


def test_a_micro_batch_that_is_said_divides_every_share() -> None:
    grid = enumerate_layouts(4, 4, rules(batches=(24,), micro_batch=3))
    assert len(grid["dp"])
    assert np.all(24 % (grid["dp"] * grid["fsdp"] * 3) == 0)
    assert not len(enumerate_layouts(4, 4, rules(batches=(16,), micro_batch=5))["dp"])


def test_where_nothing_fits_the_nearest_is_told() -> None:
    tiny = replace(A100, memory_bytes=1e6)
    found = search(question(configs=(tiny,)))
    assert not len(found)
    assert found.tightest is not None
    config, devices, excess = found.tightest
    assert (config, devices) == (0, 8)
    assert excess > 1


def test_a_device_is_not_asked_for_a_precision_it_has_not() -> None:
    found = search(question(configs=(T4,)))
    names = {PRECISIONS[int(code)] for code in found.points.precision}
    assert names <= {"fp16", "fp32"}
    assert np.all(found.points.dp[found.points.precision == PRECISIONS.index("fp16")] >= 1)


def test_nodes_are_counted_in_full_machines() -> None:
    asked = question(most_devices=24)
    assert node_counts(A100, asked) == [1, 2, 3, 4, 6]
    assert node_counts(replace(A100, devices=3), asked) == [1], "left-overs are had once"
    assert node_counts(replace(A100, most_nodes=1), asked) == [1]
    assert node_counts(A100, replace(asked, least_devices=16)) == [4, 6]


@pytest.mark.parametrize(
    ("devices", "nodes"), [(12, [3]), (20, [5]), (24, [6]), (40, [10]), (10, []), (2, [])]
)
def test_a_number_of_devices_that_is_said_is_met_by_whole_machines(
    devices: int, nodes: list[int]
) -> None:
    many = tuple(replace(A100, network_bytes_per_s=1e9 * count) for count in range(1, 61))
    for configs in ((A100,), many):
        asked = question(configs=configs, least_devices=devices, most_devices=devices)
        assert node_counts(A100, asked) == nodes
        assert node_counts(replace(A100, most_nodes=1), asked) == []
    odd = replace(A100, devices=3, domain=3)
    assert node_counts(odd, question(least_devices=6, most_devices=6)) == []
    assert node_counts(odd, question(least_devices=3, most_devices=3)) == [1]


def test_what_is_said_does_not_open_an_axis_that_is_barred() -> None:
    barred = rules(barred=frozenset({"tp"}), pinned={"tp": 2})
    assert not len(enumerate_layouts(4, 4, barred)["dp"])
    assert len(enumerate_layouts(4, 4, replace(barred, pinned={"tp": 1}))["dp"])


def test_evaluations_between_steps_follow_the_batch_of_each_point() -> None:
    thrice = search(question()).points.take(np.zeros(3, dtype=np.int64))
    points = thrice.with_columns(batch=np.array([16.0, 32.0, 64.0]))
    step_s = np.array([1.0, 2.0, 4.0])
    some = replace(work(samples=6400), evaluation_share=0.1)
    plain = run_seconds(some, points, step_s)
    assert plain == pytest.approx(400 * 1.1)
    often = replace(some, evaluate_every=10, evaluation_samples=480.0)
    times = np.array([40.0, 20.0, 10.0])
    forward = times * 480 / points.batch * step_s / 3
    assert run_seconds(often, points, step_s) == pytest.approx(plain + forward)
