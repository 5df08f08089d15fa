"""Memory that runs out is known by every name it has, and what failed leaves nothing behind."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from yunlu.core.errors import ModelError, TrainingError
from yunlu.training.memory.out_of_memory import (
    StepRestorePoint,
    is_out_of_memory,
    memory_capped,
    smaller,
    with_less_memory,
)

SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: ..."),
    RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=str)
def test_a_shortage_is_known_also_as_a_cause(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ModelError("The model failed on its first batch.")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
        RuntimeError("could not create a primitive"),
    ],
    ids=str,
)
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        with_less_memory(_raising(error), 8, undo=_never, on_shrink=_never)


def _raising(error: Exception) -> Callable[[int], None]:
    def attempt(_size: int) -> None:
        raise error

    return attempt


def _never(*_: object) -> None:
    raise AssertionError


@given(st.integers(1, 10_000))
def test_halving_ends_at_one_and_doubles_the_passes_at_most(batch: int) -> None:
    size, halvings = batch, 0
    while (next_size := smaller(size)) is not None:
        assert 1 <= next_size < size
        size, halvings = next_size, halvings + 1
        assert -(-batch // size) <= 2**halvings
    assert size == 1


def test_a_failed_attempt_is_undone_freed_and_told_of() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive_at_undo: list[bool] = []
    on_shrink: list[tuple[int, str]] = []

    def attempt(size: int) -> int:
        activations = torch.ones(100)
        held.append(weakref.ref(activations))
        if size > 2:
            try:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore lines")
            except RuntimeError as error:
                kept = error  # a frame and its error that hold each other
                raise ModelError("The model failed.") from kept
        return size * 10

    found = with_less_memory(
        attempt,
        7,
        undo=lambda: alive_at_undo.append(held[-1]() is not None),
        on_shrink=lambda size, message: on_shrink.append((size, message)),
    )
    assert found == (20, 2)
    assert alive_at_undo == [False, False]
    assert [size for size, _ in on_shrink] == [4, 2]


def test_a_single_sample_that_does_not_fit_ends_with_advice() -> None:
    with pytest.raises(TrainingError, match="one sample: CUDA out of memory") as caught:
        with_less_memory(
            _raising(torch.OutOfMemoryError("CUDA out of memory")),
            2,
            undo=lambda: None,
            on_shrink=lambda _size, _message: None,
        )
    assert "train.recompute" in str(caught.value.hint)


def test_a_step_begins_anew_with_its_draws_averages_and_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    start = StepRestorePoint(model)
    model(torch.randn(3, 4))
    start.mark()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.ones(3, 4)
    first = model(inputs)
    first.sum().backward()
    start.restore()
    assert all(weight.grad is None for weight in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model(inputs), first)


def test_under_a_cap_too_much_is_an_error_and_afterwards_it_is_not() -> None:
    with memory_capped(64e6), pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 30, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with memory_capped(1e9):  # oneDNN does not say why it fails
        assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert torch.empty(1 << 30, dtype=torch.uint8).nbytes == 1 << 30
    with memory_capped(None):
        torch.empty(1 << 30, dtype=torch.uint8)
