from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yunlu.core.errors import DataError
from yunlu.training.data.batches import BatchShard, micro_indices, sequential_batches, step_batches
from yunlu.training.data.sample_order import StepOrder, digest_of
from yunlu.training.tasks.task import Batch

ORDER = StepOrder(samples=23, batch=8, seed=1)


def collate(samples: Sequence[Any]) -> Batch:
    values = torch.tensor(samples)
    return Batch(inputs=(values,), targets=values, samples=len(values), items=len(values))


class Numbers:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise DataError("sample 7 cannot be read", hint="look at sample 7")
        return index


def drawn(first_step: int = 0, workers: int = 0) -> list[list[list[int]]]:
    steps = step_batches(
        Numbers(), collate, ORDER, micro_batch=3, first_step=first_step, steps=9, workers=workers
    )
    return [[micro.targets.tolist() for micro in micros] for micros in steps]


def test_micro_batches_together_are_the_batch() -> None:
    steps = drawn()
    assert len(steps) == 9
    assert [len(micros) for micros in steps[:3]] == [3, 3, 3]
    assert sorted(value for micros in steps[:3] for micro in micros for value in micro) == list(
        range(23)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_and_a_late_start_change_nothing(workers: int) -> None:
    state = torch.get_rng_state()
    assert drawn(first_step=4, workers=workers) == drawn()[4:]
    assert torch.equal(torch.get_rng_state(), state), "training's random numbers are not drawn from"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_for_the_user_comes_whole_out_of_a_loading_process(workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(sequential_batches(Broken(), collate, micro_batch=4, workers=workers))
    assert caught.value.message == "sample 7 cannot be read"
    assert caught.value.hint == "look at sample 7"


LENGTHS = np.array([(7 * index) % 23 + 1 for index in range(23)])


def cut(lengths: np.ndarray | None, micro_batch: int) -> list[list[int]]:
    return list(micro_indices(ORDER, micro_batch, 0, 6, lengths=lengths))


def test_samples_of_like_length_share_a_micro_batch_of_the_same_step() -> None:
    steps, micros = list(islice(ORDER.steps_from(0), 6)), iter(cut(LENGTHS, 3))
    for step in steps:
        parts = list(islice(micros, -(-len(step) // 3)))
        together = [index for part in parts for index in part]
        assert sorted(together) == sorted(step.tolist())
        assert LENGTHS[together].tolist() == sorted(LENGTHS[step].tolist())


def test_a_step_in_one_piece_and_data_without_lengths_keep_their_order() -> None:
    plain = [step.tolist() for step in islice(ORDER.steps_from(0), 6)]
    assert [part.tolist() for part in cut(LENGTHS, 8)] == plain
    assert [index for part in cut(None, 3) for index in part] == [i for p in plain for i in p]


@pytest.mark.parametrize("workers", [0, 2])
def test_sorting_does_not_depend_on_processes_or_a_late_start(workers: int) -> None:
    def run(first_step: int, workers: int) -> list[list[list[int]]]:
        steps = step_batches(
            Numbers(),
            collate,
            ORDER,
            micro_batch=3,
            first_step=first_step,
            steps=9,
            workers=workers,
            lengths=LENGTHS,
        )
        return [[micro.targets.tolist() for micro in micros] for micros in steps]

    assert run(4, workers) == run(0, 0)[4:]


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 40),
    micro_batch=st.integers(1, 9),
    replicas=st.integers(1, 7),
    by_length=st.booleans(),
)
def test_replicas_share_out_every_step_and_meet_in_every_micro_batch(
    samples: int, batch: int, micro_batch: int, replicas: int, by_length: bool
) -> None:
    order = StepOrder(samples=samples, batch=min(batch, samples), seed=3)
    steps, lengths = 5, np.arange(samples) * 7 % 11 if by_length else None
    shares = [
        iter(
            list(
                micro_indices(
                    order, micro_batch, 0, steps, lengths=lengths, share=BatchShard(r, replicas)
                )
            )
        )
        for r in range(replicas)
    ]
    for step in islice(order.steps_from(0), steps):
        taken: list[int] = []
        while len(taken) < len(step):
            together = [next(share) for share in shares]  # all have another one
            assert all(1 <= len(micro) <= micro_batch for micro in together)
            taken += [index for micro in together for index in micro.tolist() if index >= 0]
            stand_ins = [-1 - index for micro in together for index in micro.tolist() if index < 0]
            assert set(stand_ins) <= set(step.tolist())
        assert sorted(taken) == sorted(step.tolist())
    assert all(next(share, None) is None for share in shares)


def test_a_stand_in_counts_for_nothing_and_digests_add_up() -> None:
    order = StepOrder(samples=5, batch=5, seed=1)
    parts: list[Batch] = []
    for replica in range(7):
        share = BatchShard(replica, 7)
        (micros,) = step_batches(
            Numbers(),
            collate,
            order,
            micro_batch=2,
            first_step=0,
            steps=1,
            workers=0,
            share=share,
            digests=True,
        )
        parts += micros
    assert [part.counts for part in parts].count(False) == 2
    assert sum(part.samples for part in parts) == sum(part.items for part in parts) == 5
    whole = digest_of(np.arange(5))
    assert sum(part.digest for part in parts) % 2**64 == whole
    assert digest_of(np.array([0, 1, 2, 3, 3])) != whole != digest_of(np.arange(4))
