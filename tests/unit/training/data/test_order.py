from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from yunlu.training.data.order import StepOrder, permute

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
