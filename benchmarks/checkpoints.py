"""How long a save keeps training waiting: Yunlu's beside torch.save and torch's distributed checkpoints.

``python benchmarks/checkpoints.py`` takes about a minute. All contenders save the same state in turns,
while the same steps run; figures are ratios to Yunlu's own blocking save of the same round, so that a
busy machine slows both sides.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.checkpoint.store import CheckpointStore
from yunlu.training.tensor_slices import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCKING = "Yunlu, blocking"
_AT_ONCE = "Yunlu, copied at once"
_BESIDE = "Yunlu, copied beside the next step"
_LIMIT = 0.10
"""The share of a blocking save that ours may keep training waiting."""


class Training:
    """State of some size, and steps that read it and then change it."""

    def __init__(self, megabytes: int) -> None:
        count, self._side = 24, 512
        rows = megabytes * (1 << 20) // (3 * count * self._side * 4)
        self.weights = {f"layer{i}": torch.randn(rows, self._side) for i in range(count)}
        self.means = {name: torch.randn_like(weight) for name, weight in self.weights.items()}
        self.squares = {name: torch.rand_like(weight) for name, weight in self.weights.items()}
        self._batch = torch.randn(64, self._side)

    def state(self) -> dict[str, Any]:
        """As one would give it to torch."""
        return {"model": self.weights, "means": self.means, "squares": self.squares}

    def snapshot(self, step: int) -> Snapshot:
        """As Yunlu's engine gives it."""
        shards = {
            group: {name: shard_of(name, tensor) for name, tensor in tensors.items()}
            for group, tensors in self.state().items()
        }
        return Snapshot(step=step, shards=shards, state={"step": step})

    def run_step(self, before_update: Callable[[], None]) -> None:
        """Forward work of some tens of milliseconds, then an update."""
        for weight in self.weights.values():
            _ = self._batch @ weight.t()
        before_update()
        for name, weight in self.weights.items():
            weight.add_(self.means[name], alpha=1e-6)


class Contenders:
    """Each saves once: how long training stood still, and how much it was delayed in all."""

    def __init__(self, training: Training, root: Path) -> None:
        self._training, self._root, self._saves = training, root, 0
        self._store = CheckpointStore(
            root / "ours", keep_last=2, keep_best=1, metric="loss", lower_is_better=True,
            saved=lambda *_: None,
        )  # fmt: skip
        self._store.reserve(
            sum(one.nbytes for group in training.state().values() for one in group.values())
        )
        self._group = dist.new_group(backend="gloo")

    def all(self) -> dict[str, Callable[[], tuple[float, float]]]:
        """By the name in the table."""
        return {
            _BLOCKING: self._blocking,
            _AT_ONCE: lambda: self._ours(defer=False),
            _BESIDE: lambda: self._ours(defer=True),
            "torch.save": self._torch,
            "DCP save": self._dcp,
            "DCP async_save": self._dcp_async,
        }

    def close(self) -> None:
        """End the thread."""
        self._store.close()

    def _blocking(self) -> tuple[float, float]:
        started_at = time.perf_counter()
        self._store.save(self._next())
        self._store.wait()
        return _twice(time.perf_counter() - started_at)

    def _ours(self, *, defer: bool) -> tuple[float, float]:
        started_at = time.perf_counter()
        self._store.save(self._next(), defer=defer)
        stall_s = time.perf_counter() - started_at

        def finish() -> None:
            nonlocal stall_s
            waiting_at = time.perf_counter()
            self._store.finish_copy()
            stall_s += time.perf_counter() - waiting_at

        lost_s = self._train_until(lambda: not self._store.is_saving, finish, started_at)
        self._store.wait()
        return stall_s, lost_s

    def _torch(self) -> tuple[float, float]:
        started_at = time.perf_counter()
        torch.save(self._training.state(), self._root / "whole.pt")
        return _twice(time.perf_counter() - started_at)

    def _dcp(self) -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=self._root) as directory:
            started_at = time.perf_counter()
            dcp.save(self._training.state(), checkpoint_id=directory, process_group=self._group)
            return _twice(time.perf_counter() - started_at)

    def _dcp_async(self) -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=self._root) as directory:
            started_at = time.perf_counter()
            saving: Any = dcp.async_save(
                self._training.state(), checkpoint_id=directory, process_group=self._group
            )
            stall_s = time.perf_counter() - started_at
            lost_s = self._train_until(saving.done, lambda: None, started_at)
            saving.result()
            return stall_s, lost_s

    def _train_until(
        self, is_done: Callable[[], bool], before_update: Callable[[], None], started_at: float
    ) -> float:
        """How much later than without the save the steps are done that run beside it."""
        steps = 0
        while not is_done() or not steps:
            self._training.run_step(before_update)
            steps += 1
        elapsed_s = time.perf_counter() - started_at
        again_at = time.perf_counter()
        for _ in range(steps):
            self._training.run_step(lambda: None)
        return max(0.0, elapsed_s - (time.perf_counter() - again_at))

    def _next(self) -> Snapshot:
        self._saves += 1
        return self._training.snapshot(self._saves)


def main() -> int:
    """Measure, print the table; the exit code says whether the aim was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=90, help="no new round after this")
    parser.add_argument("--directory", type=Path, help="where to save; by default a temporary one")
    asked = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = Path(tempfile.mkdtemp(prefix="yunlu-bench-", dir=asked.directory))
    contenders = Contenders(Training(asked.megabytes), root)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders.all()}
    ends_at = time.monotonic() + asked.seconds
    try:
        for number in range(asked.rounds + 1):
            took = {name: save() for name, save in contenders.all().items()}
            whole_s = took[_BLOCKING][0]
            if number:  # the first round warms up: memory, threads, imports
                for name, (stall_s, lost_s) in took.items():
                    ratios[name].append((stall_s / whole_s, lost_s / whole_s))
            if time.monotonic() > ends_at:
                break
    finally:
        contenders.close()
        dist.destroy_process_group()
        shutil.rmtree(root, ignore_errors=True)
    return _show(ratios, asked.megabytes)


def _show(ratios: dict[str, list[tuple[float, float]]], megabytes: int) -> int:
    rounds = len(ratios[_BLOCKING])
    table = Table(title=f"Training waits for a save of {megabytes} MB ({rounds} rounds)")
    table.add_column("saved by")
    for title in ("stall", "worst", "delay in all", "worst"):
        table.add_column(title, justify="right")
    for name, values in ratios.items():
        columns = zip(*values, strict=True)
        figures = [figure for one in columns for figure in (statistics.median(one), max(one))]
        table.add_row(name, *(f"{figure:.1%}" for figure in figures))
    Console().print(table)
    Console().print(f"100 % is Yunlu's blocking save. The aim is a stall of at most {_LIMIT:.0%}.")
    return int(statistics.median(stall for stall, _ in ratios[_BESIDE]) > _LIMIT)


def _twice(seconds: float) -> tuple[float, float]:
    return seconds, seconds


if __name__ == "__main__":
    sys.exit(main())
