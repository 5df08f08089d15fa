"""What collectives send, and what a layout sends in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from yunlu.hardware.fleet import Link
from yunlu.planning.collectives import list_exchanges, sent_share
from yunlu.planning.communication.timing import SCHEDULES
from yunlu.planning.layouts import (
    Layout,
    SplitConstraints,
    held_parts,
    peak_parts,
    worker_bytes,
    worker_share,
)
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.memory import peak_memory
from yunlu.planning.predict.query_batch import QueryBatch, make_queries
from yunlu.planning.predict.step_time import Ring, step_time

FACTS = SplitConstraints(
    parameters=1000, trainable=1000, state_bytes=8000, activation_bytes_per_sample=6800,
    boundary_bytes_per_sample=100, layers=4, tensor_ways=(1, 2, 4),
)  # fmt: skip
LINK = Link(name="x", bytes_per_s=1e3, message_s=0.5)


def sent(layout: Layout, *, batch: int = 16, micro: int = 2) -> dict[str, float]:
    share = worker_share(layout, batch=batch, micro_batch=micro)
    totals: dict[str, float] = {}
    for exchange in list_exchanges(layout, FACTS, share):
        totals[exchange.axis] = totals.get(exchange.axis, 0.0) + exchange.sent_bytes
    return totals


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    members = np.array([1.0, 2.0, 8.0])
    both = sent_share("all-gather", members) + sent_share("reduce-scatter", members)
    assert sent_share("all-reduce", members).tolist() == both.tolist() == [0.0, 1.0, 1.75]
    assert sent_share("send", 7) == 1.0


def test_one_worker_exchanges_nothing() -> None:
    assert sent(Layout()) == {}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(dp=4), {"dp": 2 * 3 / 4 * 4000}),
        # Two gathers and one reduction for each of 4 micro-batches, of all weights.
        (Layout(fsdp=2), {"fsdp": 12 * 1 / 2 * 4000}),
        # 4 all-reduces of the boundary in each of 4 blocks.
        (Layout(tp=2), {"tp": 4 * 4 * 2 * 1 / 2 * 1600}),
        (Layout(pp=2), {"pp": 2 * 1600}),
        (Layout(dp=2, pp=2), {"dp": 2 * 1 / 2 * 2000, "pp": 2 * 800}),
    ],
)
def test_a_layout_sends_what_its_axes_do(layout: Layout, expected: dict[str, float]) -> None:
    assert sent(layout) == pytest.approx(expected)


def test_every_message_has_its_latency() -> None:
    (exchange,) = list_exchanges(
        Layout(dp=2), FACTS, worker_share(Layout(dp=2), batch=4, micro_batch=2)
    )
    assert exchange.seconds(LINK) == pytest.approx(4000 / 1e3 + 0.5)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero1=True), Layout(fsdp=2, tp=2)])
def test_the_peak_is_what_is_held_and_a_copy_for_the_checkpoint(layout: Layout) -> None:
    share = worker_share(layout, batch=8, micro_batch=2)
    here = FACTS.model_copy(update={"on_cpu": True})
    parts = peak_parts(layout, here, share, process_bytes=500.0)
    copy = (parts["weights"] + parts["optimizer"]) / layout.dp
    assert sum(parts.values()) == pytest.approx(500 + worker_bytes(layout, here, share) + copy)
    more = peak_parts(layout, here, share, process_bytes=500.0, averages=True)
    assert sum(more.values()) == pytest.approx(sum(parts.values()) + FACTS.weight_bytes)


def test_the_copy_for_the_checkpoint_is_not_on_an_accelerator() -> None:
    share = worker_share(Layout(), batch=8, micro_batch=2)
    parts = peak_parts(Layout(), FACTS, share, process_bytes=500.0)
    assert sum(parts.values()) == pytest.approx(500 + worker_bytes(Layout(), FACTS, share))


def test_measured_passes_stand_for_weights_gradients_and_activations() -> None:
    share = worker_share(Layout(), batch=8, micro_batch=2)
    here = FACTS.model_copy(update={"on_cpu": True})
    parts = peak_parts(Layout(), here, share, process_bytes=500.0, passes_bytes=9e4)
    assert sum(parts.values()) == pytest.approx(9e4 + 8000 + (4000 + 8000))
    released = peak_parts(
        Layout(), here, share, process_bytes=500.0, passes_bytes=9e4, releases_gradients=True
    )
    assert sum(released.values()) == pytest.approx(sum(parts.values()) - FACTS.gradient_bytes)


# Two descriptions of one thing: what our engine holds and sends (``layouts``, ``collectives``), and the
# fitted formulas for any stack (``predict``). Where both speak of the same, they must agree.

MODEL: dict[str, float] = {
    "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 256, "gated": 0,
    "vocab": 0, "tied": 1, "causal": 1, "experts": 1, "active_experts": 1, "parameters": 2e5,
    "active_parameters": 2e5, "trainable": 2e5, "base_bytes": 4, "flops_per_token": 1e6, "seq": 32,
    "batch": 16, "micro_batch": 2, "sequence": 0, "virtual": 1, "cp": 1, "ep": 1, "recompute": 0,
    "precision": 0, "peak_flops": 1e14, "memory_bytes": 8e10, "memory_bytes_per_s": 2e12,
    "link_bytes_per_s": 1e11, "node_devices": 8, "network_bytes_per_s": 1e10,
    "stack": STACKS.index("yunlu"),
}  # fmt: skip
SPLIT = SplitConstraints(
    parameters=200_000, trainable=200_000, state_bytes=8 * 2e5, activation_bytes_per_sample=1e6,
    boundary_bytes_per_sample=2.0 * 32 * 64, layers=4, tensor_ways=(1, 2, 4),
)  # fmt: skip


def query(layout: Layout) -> QueryBatch:
    zero = 3 if layout.fsdp > 1 else int(layout.zero1)
    axes = {axis: layout.size_of(axis) for axis in ("dp", "fsdp", "tp", "pp")}
    return make_queries(1, **{**MODEL, **axes, "zero": zero, "devices": layout.world})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(), Layout(dp=4), Layout(dp=4, zero1=True), Layout(fsdp=4), Layout(dp=2, fsdp=2),
        Layout(tp=2), Layout(pp=2), Layout(dp=2, tp=2, pp=2, zero1=True), Layout(fsdp=2, pp=4),
    ],
    ids=str,
)  # fmt: skip
def test_both_memory_models_share_out_the_same_states(layout: Layout) -> None:
    memory = peak_memory(query(layout))
    held = held_parts(layout, SPLIT, worker_share(layout, batch=16, micro_batch=2))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(memory, part)[0] == pytest.approx(held[part]), part


@pytest.mark.parametrize(("stages", "micros"), [(2, 8), (4, 8), (4, 2)])
def test_both_memory_models_hold_a_pass_for_each_stage(stages: int, micros: int) -> None:
    def ratio(of: Callable[[Layout], float]) -> float:
        return of(Layout(pp=stages)) / of(Layout())

    def fitted(layout: Layout) -> float:
        # So deep that what is kept once, besides the blocks, hardly counts.
        points = query(layout).with_columns(batch=2.0 * micros, layers=256.0)
        return float(peak_memory(points).activations[0])

    def held(layout: Layout) -> float:
        share = worker_share(layout, batch=2 * micros, micro_batch=2)
        return held_parts(layout, SPLIT, share)["activations"]

    assert ratio(fitted) == pytest.approx(ratio(held), rel=0.05)


@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_under_interleaving_what_our_engine_holds_is_the_larger(stages: int, virtual: int) -> None:
    plain = Layout(pp=stages)
    interleaved = Layout(pp=stages, stages_per_rank=virtual, schedule="interleaved")
    share = worker_share(plain, batch=16, micro_batch=2)
    held, held_plain = (held_parts(at, SPLIT, share)["activations"] for at in (interleaved, plain))
    points = query(plain).with_columns(layers=256.0)
    fitted = peak_memory(points.with_columns(virtual=float(virtual))).activations[0]
    fitted_plain = peak_memory(points).activations[0]
    assert held / held_plain >= fitted / fitted_plain > 1.0


@pytest.mark.parametrize(
    ("axis", "layout", "fitted_bytes"),
    [
        # The formulas count 16 bits where our engine sends 32, and each axis as it names it.
        ("dp", Layout(dp=4), 0.5),
        ("tp", Layout(tp=4), 1.0),
    ],
)
def test_the_fitted_formulas_send_what_the_table_lists(
    axis: str, layout: Layout, fitted_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[float] = []

    def note(ring: Ring, message_bytes: Any) -> Any:
        if float(ring.members[0]) > 1:
            messages.append(float(message_bytes[0]))
        return np.zeros(1)

    monkeypatch.setattr(Ring, "reduce_s", note)
    step_time(query(layout))
    share = worker_share(layout, batch=16, micro_batch=2)
    (exchange,) = list_exchanges(layout, SPLIT, share)
    assert (exchange.axis, exchange.collective) == (axis, "all-reduce")
    assert messages == [pytest.approx(fitted_bytes * exchange.message_bytes)]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["ring", "direct"])
def test_rounds_of_messages_send_what_the_table_says(method: str, workers: int) -> None:
    rounds = SCHEDULES[method](list(range(workers)), 1e6)
    sent_bytes = sum(float(item.bytes.sum()) for item in rounds) / workers
    assert sent_bytes == pytest.approx(sent_share("all-reduce", workers) * 1e6)
