from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from yunlu.core.errors import DataError
from yunlu.training.data.batches import micro_indices, sequential_batches, step_batches
from yunlu.training.data.order import StepOrder
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
