"""Single modules in full precision: found, moved, copied and moved back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel

from yunlu.training.precision.ranges import (
    find_candidates,
    is_covered,
    is_movable,
    run_as_given,
    run_in_full,
)


class Table(nn.Module):
    """A matrix of somebody's own making, and a weight that is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.matrix)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(
            torch.zeros(1, 3, 4)
        )  # a matrix, but of a module around others
        self.embed = nn.Embedding(7, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm((3, 4))
        self.squeezed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.table = Table()
        self.memory = nn.GRU(4, 4, batch_first=True)
        self.convolve = nn.Conv1d(3, 3, 1)


def test_candidates_are_the_modules_with_products_of_their_own() -> None:
    found = find_candidates(Everything())
    assert list(found) == ["attend", "squeezed", "table", "memory", "convolve"]
    assert list(find_candidates(nn.Linear(2, 2))) == [""]


def test_a_module_is_covered_by_itself_and_what_is_around_it() -> None:
    assert is_covered("a.b.c", {"a.b"})
    assert is_covered("a.b", {"a.b"})
    assert is_covered("a", {""})
    assert not is_covered("a.bc", {"a.b"})
    assert not is_covered("a", {"a.b"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_in_full_precision_gives_the_fp32_result_from_low_inputs(
    dtype: torch.dtype,
) -> None:
    module, inputs = nn.Linear(4, 4), torch.randn(2, 4).to(dtype)
    exact = module(inputs.float())
    run_in_full(module)
    with torch.autocast("cpu", dtype=dtype):
        found = module(inputs)
    assert found.dtype is torch.float32
    assert torch.equal(found, exact)
    assert not is_movable(module)
    run_as_given(module)
    assert is_movable(module)
    with torch.autocast("cpu", dtype=dtype):
        assert module(inputs).dtype is dtype


def test_nested_arguments_are_widened_and_others_left_alone() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    memory = nn.GRU(4, 4, batch_first=True)
    low = torch.randn(2, 3, 4).bfloat16()
    mask = torch.zeros(3, 3, dtype=torch.bool)
    run_in_full(attention)
    run_in_full(memory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, shares = attention(low, low, value=low, attn_mask=mask)
        packed = pack_padded_sequence(low, torch.tensor([3, 2]), batch_first=True)
        states, _ = memory(packed, torch.zeros(1, 2, 4).bfloat16())
    assert {outputs.dtype, shares.dtype, states.data.dtype} == {torch.float32}


def test_names_copies_and_averages_are_not_disturbed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names, inputs = list(model.state_dict()), torch.randn(2, 3)
    run_in_full(model[1])
    assert list(model.state_dict()) == names
    twin, average = copy.deepcopy(model), AveragedModel(model)
    with torch.no_grad():
        for weight in model[1].parameters():
            weight.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not model(inputs).any()
        for other in (twin, average):
            outputs = other(inputs)
            assert outputs.dtype is torch.float32  # still in full precision,
            assert outputs.any()  # and with its own weights
    fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh.load_state_dict(model.state_dict())
    assert type(fresh[1]) is type(model[1])


class Pair(nn.Module):
    """Of a class of its own: torch compiles no module whose class is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_compiled_model_follows_the_moves() -> None:
    model = Pair()
    compiled = CompileCounter()
    model.compile(backend=compiled, fullgraph=True)
    found: list[Any] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(model(torch.randn(2, 3)).dtype)
        run_in_full(model.second)
        found.append(model(torch.randn(2, 3)).dtype)
        run_as_given(model.second)
        found.append(model(torch.randn(2, 3)).dtype)
    assert found == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert compiled.frame_count >= 2
