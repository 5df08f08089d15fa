from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from yunlu.core.errors import DataError
from yunlu.training.data.batches import sequential_batches, step_batches
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
