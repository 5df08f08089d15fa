from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.large_batch import count_steps, phases_of
from yunlu.spec.train import GrowBatchSpec
from yunlu.training.data.sample_order import BucketOrder, PhasedOrder, SampleOrder, StepOrder


def plain(samples: int, batch: int) -> SampleOrder:
    return StepOrder(samples=samples, batch=batch, seed=3)


def bucketed(samples: int, batch: int) -> SampleOrder:
    return BucketOrder(
        samples=samples, batch=batch, seed=3, lengths=np.arange(samples) * 7919 % 101
    )


@st.composite
def orders(draw: st.DrawFn) -> PhasedOrder:
    samples = draw(st.integers(1, 60))
    make = draw(st.sampled_from((plain, bucketed)))
    spec = GrowBatchSpec(every=draw(st.integers(1, 3)), factor=draw(st.integers(2, 3)))
    batch = draw(st.integers(1, samples))
    phases = phases_of(spec, batch, samples, epochs=8)
    return PhasedOrder(tuple((first, make(samples, size)) for first, size in phases))


def steps_for(order: PhasedOrder, epochs: float) -> int:
    """As a plan counts them."""
    phases = [(first, phase.steps_per_epoch) for first, phase in order.phases]
    return count_steps(phases, epochs)


@given(orders())
def test_each_sample_comes_once_per_epoch_and_epochs_differ(order: PhasedOrder) -> None:
    steps = order.steps_from(0)
    seen: list[list[int]] = []
    for epoch in range(6):
        count = steps_for(order, epoch + 1) - (steps_for(order, epoch) if epoch else 0)
        indices = np.concatenate(list(islice(steps, count)))
        assert sorted(indices.tolist()) == list(range(order.samples))
        seen.append(indices.tolist())
    if order.samples > 20 and isinstance(order.phases[0][1], StepOrder):
        assert len({tuple(epoch) for epoch in seen}) == len(seen)


@given(orders(), st.integers(0, 60))
def test_starting_late_gives_the_same_steps(order: PhasedOrder, start: int) -> None:
    whole = list(islice(order.steps_from(0), start + 5))[start:]
    resumed = list(islice(order.steps_from(start), 5))
    assert [step.tolist() for step in whole] == [step.tolist() for step in resumed]


@given(orders(), st.integers(0, 60))
def test_the_counts_agree_with_the_steps(order: PhasedOrder, step: int) -> None:
    steps = list(islice(order.steps_from(0), step + 1))
    assert [len(indices) for indices in steps] == [order.size_of(s) for s in range(step + 1)]
    assert order.samples_before(step) == sum(len(indices) for indices in steps[:-1])
    assert order.epoch_at(step + 1) > order.epoch_at(step)


@given(orders(), st.integers(1, 7))
def test_an_epoch_ends_where_its_samples_do(order: PhasedOrder, epochs: int) -> None:
    steps = steps_for(order, epochs)
    assert order.epoch_at(steps) == epochs
    assert order.samples_before(steps) == epochs * order.samples
    assert [order.epoch_at(s).is_integer() for s in range(steps)].count(True) == epochs


@given(orders())
def test_the_batch_only_grows(order: PhasedOrder) -> None:
    ends = [0, *(steps_for(order, epoch) for epoch in range(1, 8))]
    batches = [max(map(order.size_of, range(*epoch))) for epoch in pairwise(ends)]
    assert batches == sorted(batches)
    assert batches[0] == order.batch


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 400))
def test_one_phase_is_the_order_itself(samples: int, batch: int, step: int) -> None:
    alone = StepOrder(samples=samples, batch=batch, seed=3)
    order = PhasedOrder(((0, alone),))
    assert next(order.steps_from(step)).tolist() == next(alone.steps_from(step)).tolist()
    assert order.samples_before(step) == alone.samples_before(step)
    assert order.epoch_at(step) == step / alone.steps_per_epoch


def test_a_fraction_of_an_epoch_counts_in_the_steps_of_its_own_phase() -> None:
    order = PhasedOrder(((0, plain(100, 10)), (2, plain(100, 50))))
    assert steps_for(order, 1.5) == 15
    assert steps_for(order, 2.5) == 21
    assert order.epoch_at(21) == 2.5


@pytest.mark.parametrize("epochs", [(), (1,), (0, 2, 2), (0, 3, 1)])
def test_phases_out_of_order_are_refused(epochs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="epoch 0"):
        PhasedOrder(tuple((epoch, plain(10, 2)) for epoch in epochs))


def test_phases_over_different_data_are_refused() -> None:
    with pytest.raises(ValueError, match="same samples"):
        PhasedOrder(((0, plain(10, 2)), (1, plain(11, 4))))
