"""The lean Adam: torch's own numbers, bit for bit, and its checkpoints."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoints import copy_optimizer, restore_optimizer
from yunlu.training.optim.fused_adam import FusedAdam


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = list(model.parameters())
    return [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]


def lean(model: nn.Module, *, decoupled: bool) -> FusedAdam:
    return FusedAdam(groups(model), lr=0.01, betas=(0.9, 0.99), eps=1e-8, decoupled=decoupled)


def torchs(model: nn.Module, *, decoupled: bool) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(groups(model), lr=0.01, betas=(0.9, 0.99), eps=1e-8, fused=True)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        # The heads take turns: a weight without a gradient is left alone.
        head = model[1 + step % 2]
        head(model[0](inputs).tanh()).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_the_weights_are_torchs_bit_for_bit(decoupled: bool) -> None:
    ours, theirs = network(), network()
    train(ours, lean(ours, decoupled=decoupled), range(20))
    train(theirs, torchs(theirs, decoupled=decoupled), range(20))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("make", [lean, torchs], ids=["ours", "torch's"])
def test_a_checkpoint_goes_on_in_either(make: Any) -> None:
    whole = network()
    train(whole, lean(whole, decoupled=True), range(12))
    first = network()
    optimizer = lean(first, decoupled=True)
    train(first, optimizer, range(7))
    tensors, packed = copy_optimizer(first, optimizer)
    second = copy.deepcopy(first)
    resumed = make(second, decoupled=True)
    restore_optimizer(second, resumed, tensors, packed)
    train(second, resumed, range(7, 12))
    assert_equal(second, whole)


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    optimizer = lean(network(), decoupled=True)
    packed = optimizer.state_dict()
    packed["param_groups"] = packed["param_groups"][:1]
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict(packed)


def test_a_plain_run_loads_no_compiler() -> None:
    """It would take a second and 70 MB before the first step."""
    program = """
import sys, tempfile, torch
from pathlib import Path
from yunlu.runs.run_store import write_job
from yunlu.runs.home import open_run
from yunlu.spec.job import Job
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.worker import run
path = Path(tempfile.mkdtemp())
job = {"task": "python:objects", "model": "net", "data": "python:objects", "train": {"steps": 3, "batch": 4}}
write_job(open_run(path), Job.model_validate(job))
task = ObjectTask(model=torch.nn.Linear(3, 1), data=(torch.randn(40, 3), torch.randn(40, 1)))
print(run(path, task=task), "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["finished", "False", "False"], done.stderr
