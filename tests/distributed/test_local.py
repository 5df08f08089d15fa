"""Workers that meet rarely, as processes of their own: one is killed, and they do learn."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.ranks import run_ranks
from tests.waiting import LIMIT_S
from yunlu.training.communication.local_updates import LocalRules, WeightAveraging
from yunlu.training.communication.transport import LinkLostError, Transport, connect

pytestmark = pytest.mark.distributed


def _meet(rank: int, size: int, store: str) -> Transport:
    return connect(
        dist.FileStore(store, size), rank, size, "127.0.0.1", secret=b"test", patience_s=LIMIT_S
    )


def _lose_one(rank: int, store: str) -> tuple[int, list[float], str]:
    weights = [torch.zeros(200_000)]
    averaging = WeightAveraging(
        weights, _meet(rank, 3, store), LocalRules(every=2, delay=1, codec="int8")
    )
    said = ""
    try:
        for step in range(1, 1000):
            weights[0] += rank + 1
            averaging.after_update(step)
            if rank == 2 and step == 8:  # its exchange has just begun
                os.kill(os.getpid(), signal.SIGKILL)
    except LinkLostError as error:
        said = str(error)
    averaging.return_to_anchor()
    averaging.close()
    return averaging.rounds, weights[0][:3].tolist(), said


def _survive(rank: int, store: str, answers: str) -> None:
    found = _lose_one(rank, store)
    Path(answers, str(rank)).write_text(json.dumps(found))


def test_a_worker_killed_in_an_exchange_leaves_the_others_with_what_was_agreed() -> None:
    with tempfile.TemporaryDirectory() as directory:
        with pytest.raises(RuntimeError, match="rank 2 died"):
            run_ranks(_survive, 3, str(Path(directory) / "store"), directory)
        answers = [json.loads(Path(directory, str(rank)).read_text()) for rank in (0, 1)]
    for rounds, weights, said in answers:
        assert said.startswith("Lost worker")
        assert rounds in {3, 4}
        # Each round moves the anchor by two steps of the mean, 2.
        assert weights == pytest.approx([4.0 * rounds] * 3, rel=1e-2)


def _learn(rank: int, size: int, store: str, figures: dict[str, Any]) -> list[float]:
    """The loss of a small network on a task of its own, seen by each worker in part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rules = LocalRules(**figures)
    averaging = WeightAveraging(list(model.parameters()), _meet(rank, size, store), rules)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(1, 241):
        inputs = torch.randn(64 // size, 8, generator=numbers)
        loss = (model(inputs) - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaging.after_update(step, samples=len(inputs))
    averaging.synchronize(exact=True)
    averaging.close()
    return [
        _error(model, teacher),
        *(weight.detach().sum().item() for weight in model.parameters()),
    ]


def _error(model: nn.Module, teacher: nn.Module) -> float:
    inputs: Tensor = torch.randn(1000, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((model(inputs) - teacher(inputs)).square().mean())


@pytest.mark.parametrize(
    "figures",
    [
        {"every": 4, "delay": 4, "codec": "int4"},
        {"every": 8, "parts": 4, "delay": 2, "codec": "int4"},
        {"every": 20, "outer_lr": 0.7, "outer_momentum": 0.5},
    ],
    ids=["local", "streamed", "diloco"],
)
def test_workers_that_meet_rarely_learn_as_one_with_all_samples_does(
    figures: dict[str, Any],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        dense, *_ = _learn(0, 1, str(Path(directory) / "one"), {"every": 1})
        found = run_ranks(_learn, 4, 4, str(Path(directory) / "four"), figures)
    assert all(each == found[0] for each in found)
    assert found[0][0] < 1.3 * dense + 1e-3, (found[0][0], dense)
