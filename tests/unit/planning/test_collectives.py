"""What collectives send, and what a layout sends in a step."""

from __future__ import annotations

import numpy as np
import pytest

from yunlu.hardware.fleet import Link
from yunlu.planning.collectives import list_exchanges, sent_share
from yunlu.planning.layout import Layout
from yunlu.planning.split_constraints import (
    SplitConstraints,
    peak_parts,
    worker_bytes,
    worker_share,
)

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
        # Two gathers for each of 4 micro-batches and one reduction, of all weights.
        (Layout(fsdp=2), {"fsdp": 9 * 1 / 2 * 4000}),
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
    parts = peak_parts(layout, FACTS, share, process_bytes=500.0)
    copy = (parts["weights"] + parts["optimizer"]) / layout.dp
    assert sum(parts.values()) == pytest.approx(500 + worker_bytes(layout, FACTS, share) + copy)
    more = peak_parts(layout, FACTS, share, process_bytes=500.0, averages=True)
    assert sum(more.values()) == pytest.approx(sum(parts.values()) + FACTS.weight_bytes)


def test_measured_passes_stand_for_weights_gradients_and_activations() -> None:
    share = worker_share(Layout(), batch=8, micro_batch=2)
    parts = peak_parts(Layout(), FACTS, share, process_bytes=500.0, passes_bytes=9e4)
    assert sum(parts.values()) == pytest.approx(9e4 + 8000 + (4000 + 8000))
    released = peak_parts(
        Layout(), FACTS, share, process_bytes=500.0, passes_bytes=9e4, releases_gradients=True
    )
    assert sum(released.values()) == pytest.approx(sum(parts.values()) - FACTS.gradient_bytes)
