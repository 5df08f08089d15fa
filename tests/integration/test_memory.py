"""A process that may not take enough memory trains on in smaller pieces, to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from yunlu.training.memory.out_of_memory import StepRestorePoint, memory_capped, with_less_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps such a limit")

STEPS = 4
MIB = 2**20


def train(room_bytes: float | None, sizes: Sequence[int]) -> dict[str, Any]:
    """A few steps by hand; ``sizes`` are the micro-batches that each step begins with, at most."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(16, 2048), nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Linear(2048, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(4096, 16)
    targets = inputs[:, :1] * inputs[:, 1:2]

    def attempt(size: int) -> float:
        total = 0.0
        for rows, wanted in zip(inputs.split(size), targets.split(size), strict=True):
            loss = (model(rows) - wanted).square().sum() / len(inputs)
            loss.backward()
            total += loss.item()
        return total

    attempt(64)  # what a first pass loads is not what is tried here
    model.zero_grad()
    start = StepRestorePoint(model)
    told: list[tuple[int, str]] = []
    losses, used = list[float](), list[int]()
    with memory_capped(room_bytes):
        for step in range(STEPS):
            start.mark()
            loss, size = with_less_memory(
                attempt,
                min([sizes[step], *used]),
                undo=start.restore,
                on_shrink=lambda size, message: told.append((size, message)),
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            used.append(size)
    return {"losses": losses, "told": told, "used": used}


def train_apart(room_bytes: float, size: int) -> subprocess.CompletedProcess[str]:
    asked = json.dumps([room_bytes, [size] * STEPS])
    command = [sys.executable, __file__, asked]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_training_goes_on_in_smaller_pieces_when_memory_runs_out() -> None:
    # All samples at once hold five activations of 32 MiB; a quarter of them, a quarter of that.
    done = train_apart(72 * MIB, 4096)
    assert done.returncode == 0, done.stderr
    short = json.loads(done.stdout)
    assert 64 <= short["used"][-1] < 4096
    halved = [4096 >> times for times in range(1, len(short["told"]) + 1)]
    assert [size for size, _ in short["told"]] == halved
    assert halved[-1] == short["used"][-1]
    roomy = train(None, [4096] * STEPS)
    assert roomy["told"] == []
    assert roomy["losses"][-1] < roomy["losses"][0]
    assert short["losses"] == pytest.approx(roomy["losses"], rel=1e-5)
    # Nothing of the failed attempts is left: the same bits as if the small pieces had been asked for.
    assert train(None, short["used"])["losses"] == short["losses"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(*json.loads(sys.argv[1]))))
