from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yunlu.training.communication.error_feedback import (
    ErrorFeedback,
    OwnerPart,
    clip_worker_gradient,
    fold_owner_residuals,
    pack_state,
    redistribute_residuals,
)


def whole(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def state_of(rank: int, size: int, length: int) -> dict[str, Tensor]:
    """One of ``size`` workers, who own equal parts; whole numbers, whose sums are exact."""
    draw = torch.Generator().manual_seed(100 * size + rank)
    start, stop = length * rank // size, length * (rank + 1) // size
    worker = ErrorFeedback({"0": torch.randint(-99, 99, (length,), generator=draw).float()})
    owner = ErrorFeedback({"0": torch.randint(-99, 99, (stop - start,), generator=draw).float()})
    place = OwnerPart(size=size, rank=rank, start=start, length=length, rounds=3)
    return pack_state(worker, owner, {"0": place}) | {"factor/0": whole(1, 2)}


def total(states: list[dict[str, Tensor]], length: int) -> Tensor:
    found = torch.zeros(length)
    for state in states:
        found += fold_owner_residuals(state).get("worker/0", torch.zeros(length))
    return found


@given(before=st.integers(1, 6), after=st.integers(1, 6), length=st.integers(1, 40))
@settings(max_examples=40)
def test_another_number_of_workers_has_the_same_total(before: int, after: int, length: int) -> None:
    states = [state_of(rank, before, length) for rank in range(before)]
    expected = torch.zeros(length)
    for state in states:
        start = int(state["place/0"][2])
        expected += state["worker/0"]
        expected[start : start + len(state["owner/0"])] += state["owner/0"]
    shared = redistribute_residuals(states, after)
    assert len(shared) == after
    assert torch.equal(total(shared, length), expected)
    assert all(torch.equal(state["factor/0"], whole(1, 2)) for state in shared)
    assert not any(name.startswith("owner/") for state in shared for name in state)


def test_a_share_is_a_copy() -> None:
    states = [state_of(0, 1, 4)]
    residuals = states[0]["worker/0"].clone()
    redistribute_residuals(states, 2)[0]["worker/0"].zero_()
    fold_owner_residuals(states[0])["worker/0"].zero_()
    assert torch.equal(states[0]["worker/0"], residuals)


def test_a_step_that_was_not_taken_leaves_no_trace() -> None:
    residual = ErrorFeedback()
    for step in (1.0, 2.0):
        left = residual.buffer("a", 2).fill_(step)
        residual.store_residual("a", left)
    residual.revert()
    assert torch.equal(residual.residuals["a"], whole(1, 1))
    residual.revert()  # only what was not settled can be undone
    assert torch.equal(residual.residuals["a"], whole(1, 1))
    residual.store_residual("a", residual.buffer("a", 2).fill_(3.0))
    residual.commit()
    residual.revert()
    assert torch.equal(residual.residuals["a"], whole(3, 3))


def test_undoing_the_first_step_leaves_nothing() -> None:
    residual = ErrorFeedback()
    residual.store_residual("a", residual.buffer("a", 2).fill_(1.0))
    residual.revert()
    values = whole(5, 5)
    residual.add_to("a", values)
    assert torch.equal(values, whole(5, 5))


def test_undoing_half_a_step_leaves_the_other_half_alone() -> None:
    residual = ErrorFeedback()
    for step in (1.0, 2.0):
        for name in "ab":
            residual.store_residual(name, residual.buffer(name, 1).fill_(step))
    residual.store_residual("a", residual.buffer("a", 1).fill_(3.0))
    residual.revert()
    assert {name: float(residuals) for name, residuals in residual.residuals.items()} == {
        "a": 2,
        "b": 2,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_one_bad_number_spoils_the_message_and_nothing_that_is_kept(bad: float) -> None:
    residual = ErrorFeedback({"a": whole(1, 2, 3)})
    values = whole(1, bad, 1)
    assert not math.isfinite(residual.add_to("a", values))
    assert values.isnan().all()
    assert torch.equal(residual.residuals["a"], whole(1, 2, 3))


def test_what_is_kept_for_a_tensor_of_another_length_is_not_used() -> None:
    residual = ErrorFeedback({"a": whole(1, 2, 3)})
    values = whole(1, 1)
    residual.add_to("a", values)
    assert torch.equal(values, whole(1, 1))


def test_error_is_relative_and_over_all_names() -> None:
    residual = ErrorFeedback()
    assert residual.error() is None
    residual.record_norms("a", given=3.0, residual=0.6)
    residual.record_norms("b", given=4.0, residual=0.8)
    assert residual.error() == pytest.approx(0.2)


def test_a_share_within_its_bound_is_not_touched() -> None:
    values = whole(0.3, 0.4)
    clip_worker_gradient(values, 1.0, 4)
    assert torch.equal(values, whole(0.3, 0.4))
    clip_worker_gradient(values, None, 4)
    assert torch.equal(values, whole(0.3, 0.4))
    values = whole(30.0, 40.0)
    clip_worker_gradient(values, 1.0, 4)
    assert torch.allclose(values, whole(0.3, 0.4))
    values = whole(1.0, math.inf)
    clip_worker_gradient(values, 1.0, 4)
    assert torch.equal(values, whole(1.0, math.inf))
