"""One worker: the code of worker groups is not even imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

PROGRAM = """
import sys
import torch
from torch import nn
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.worker import run

inputs = torch.linspace(-1, 1, 240).view(40, 6)
samples = (inputs, inputs.sum(1, keepdim=True))
data = {"train": samples, "validation": samples, "test": samples}
print(run(sys.argv[1], task=ObjectTask(model=nn.Linear(6, 1), data=data)))
print(*(name for name in sys.modules if name.startswith("yunlu.")))
"""
GROUPS = tuple(
    f"yunlu.training.{room}"
    for room in (
        "parallel",
        "communication",
        "elastic",
        "asynchronous",
        "topology.launched",
        "topology.elastic",
        "topology.worker_group",
    )
)


def test_a_run_on_one_worker_imports_no_code_of_worker_groups(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=4, batch=10, evaluate=2, checkpoint={"every": 2})
    program = [sys.executable, "-c", PROGRAM, str(run.path)]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    state, imported = output.splitlines()[-2:]
    assert state == "finished"
    assert "yunlu.training.topology.single" in imported.split()
    assert [name for name in imported.split() if name.startswith(GROUPS)] == []
