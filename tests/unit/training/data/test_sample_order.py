from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from yunlu.training.data.sample_order import BucketOrder, StepOrder, make_order, permute

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**32 - 1)


@given(sizes, seeds, st.integers(0, 1000))
def test_an_epoch_visits_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size, dtype=np.uint64), size, seed=seed, epoch=epoch)
    assert sorted(images.tolist()) == list(range(size))


@given(sizes, st.integers(1, 200), seeds, st.integers(0, 200))
def test_starting_late_gives_the_same_steps(size: int, batch: int, seed: int, start: int) -> None:
    order = StepOrder(samples=size, batch=batch, seed=seed)
    whole = list(islice(order.steps_from(0), start + 3))[start:]
    resumed = list(islice(order.steps_from(start), 3))
    assert [step.tolist() for step in whole] == [step.tolist() for step in resumed]


@given(sizes, st.integers(1, 200), st.integers(0, 50))
def test_the_counts_agree_with_the_steps(size: int, batch: int, step: int) -> None:
    order = StepOrder(samples=size, batch=batch, seed=1)
    steps = list(islice(order.steps_from(0), step + 1))
    assert [len(indices) for indices in steps] == [order.size_of(s) for s in range(step + 1)]
    assert order.samples_before(step) == sum(len(indices) for indices in steps[:-1])


def test_epochs_and_seeds_differ() -> None:
    positions = np.arange(1000, dtype=np.uint64)
    first = permute(positions, 1000, seed=0, epoch=0)
    assert (first != permute(positions, 1000, seed=0, epoch=1)).mean() > 0.9
    assert (first != permute(positions, 1000, seed=1, epoch=0)).mean() > 0.9


def test_every_place_is_equally_likely_over_many_epochs() -> None:
    size, epochs = 50, 4000
    positions = np.arange(size, dtype=np.uint64)
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), permute(positions, size, seed=7, epoch=epoch)] += 1
    expected = epochs / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def bucketed(size: int, batch: int, seed: int, *, longest: int = 40) -> BucketOrder:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, size)
    return BucketOrder(samples=size, batch=batch, seed=seed, lengths=lengths)


@given(sizes, st.integers(1, 200), seeds, st.integers(0, 5))
def test_batches_by_length_visit_every_sample_once_per_epoch(
    size: int, batch: int, seed: int, epoch: int
) -> None:
    order = bucketed(size, batch, seed)
    steps = islice(order.steps_from(epoch * order.steps_per_epoch), order.steps_per_epoch)
    assert sorted(np.concatenate(list(steps)).tolist()) == list(range(size))


@given(sizes, st.integers(1, 200), seeds, st.integers(0, 200))
def test_batches_by_length_start_late_as_if_they_never_stopped(
    size: int, batch: int, seed: int, start: int
) -> None:
    whole = list(islice(bucketed(size, batch, seed).steps_from(0), start + 3))[start:]
    resumed = list(islice(bucketed(size, batch, seed).steps_from(start), 3))
    assert [step.tolist() for step in whole] == [step.tolist() for step in resumed]


@given(sizes, st.integers(1, 200), st.integers(0, 50))
def test_batches_by_length_count_as_plain_ones_do(size: int, batch: int, step: int) -> None:
    order, plain = bucketed(size, batch, 1), StepOrder(samples=size, batch=batch, seed=1)
    steps = list(islice(order.steps_from(0), step + 1))
    assert [len(indices) for indices in steps] == [plain.size_of(s) for s in range(step + 1)]
    assert order.size_of(step) == plain.size_of(step)
    assert order.samples_before(step) == plain.samples_before(step)
    assert order.steps_per_epoch == plain.steps_per_epoch


def test_a_batch_holds_samples_of_like_length_and_batches_come_mixed() -> None:
    order = bucketed(8000, 8, 3, longest=256)
    steps = list(islice(order.steps_from(0), 1000))
    spreads = [np.ptp(order.lengths[step]) for step in steps]
    assert np.mean(spreads) < 10, "uniform lengths would spread over 199 in the mean"
    means = np.array([order.lengths[step].mean() for step in steps])
    neighbours = np.corrcoef(means[:-1], means[1:])[0, 1]
    assert abs(neighbours) < 0.15, "long batches must not follow each other"


def test_the_companions_of_a_sample_change_from_epoch_to_epoch() -> None:
    order = bucketed(400, 8, 3)
    steps = list(islice(order.steps_from(0), 2 * order.steps_per_epoch))
    first, second = (
        {frozenset(step.tolist()) for step in steps[start : start + order.steps_per_epoch]}
        for start in (0, order.steps_per_epoch)
    )
    assert not first & second


def test_every_way_but_batching_by_length_takes_the_plain_order() -> None:
    lengths = np.arange(100)
    plain = StepOrder(samples=100, batch=8, seed=5)
    assert make_order(100, 8, 5) == plain
    assert make_order(100, 8, 5, lengths=lengths, padding="pad") == plain
    assert make_order(100, 8, 5, lengths=lengths, padding="pack") == plain
    assert isinstance(make_order(100, 8, 5, lengths=lengths, padding="bucket"), BucketOrder)


def test_samples_with_two_sides_are_sorted_by_both() -> None:
    sides = np.array([[9, 1], [1, 1], [1, 9], [1, 2]] * 64)
    order = make_order(256, 2, 0, lengths=sides, padding="bucket")
    steps = islice(order.steps_from(0), order.steps_per_epoch)
    totals = np.array([sides[step].sum(axis=1) for step in steps])
    assert (totals[:, 0] == totals[:, 1]).mean() > 0.9
