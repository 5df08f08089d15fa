"""One worker on one host: a model, its text, a plain loop, one method by name.

Nothing is evaluated while the clock runs: weights are copied every so many steps, and looked at when all
is over. What is written down stands in ``worker-RANK.json``.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.comm_parts.meeting import make_parser, meet
from benchmarks.comm_parts.methods import make_method
from benchmarks.comm_parts.workload import VOCABULARY, Workload, make_text, read_samples
from yunlu.training.models.transformer import CausalTransformer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    """Meet, train, evaluate, write down."""
    asked = _parse()
    store = meet(asked)
    workload = Workload(**json.loads(asked.workload))
    run = Training(asked, workload, store)
    record = run.train()
    record |= run.evaluate()
    path = asked.directory / f"worker-{asked.rank}.json"
    path.write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--method", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations")
    parser.add_argument("--workload", default="{}", help="changes of the workload, as JSON")
    return parser.parse_args()


class Training:
    """One run of one worker."""

    def __init__(self, asked: argparse.Namespace, workload: Workload, store: Any) -> None:
        self._asked, self._workload = asked, workload
        torch.manual_seed(workload.seed)
        self._model = make_model(workload)
        self._optimizer = torch.optim.AdamW(
            decay_groups(self._model, workload.weight_decay), lr=workload.lr, fused=True
        )
        self._samples = my_samples(workload, asked.steps, asked.rank, asked.size)
        self._method = make_method(
            asked.method, rank=asked.rank, size=asked.size, store=store,
            address=asked.address, model=self._model, optimizer=self._optimizer, workload=workload,
            steps=asked.steps,
        )  # fmt: skip
        self._snapshots: list[tuple[int, Tensor]] = []

    def train(self) -> dict[str, Any]:
        """The loop, and its figures."""
        method, model = self._method, self._model
        losses: list[Tensor] = []
        ends: list[float] = []
        dist.barrier()
        sent, cpu_s, began_at = read_counter(), time.process_time(), time.monotonic()
        for step, tokens in enumerate(self._samples):
            set_rate(self._optimizer, self._workload, step)
            loss = loss_of(method.module, tokens)
            method.before_backward(model)
            loss.backward()
            method.after_backward(model)
            method.update(model)
            self._optimizer.zero_grad()
            method.after_update(model)
            losses.append(loss.detach())
            ends.append(time.monotonic() - began_at)
            self._keep_weights(step + 1)
        cpu_s = time.process_time() - cpu_s
        counted = method.sent_bytes()
        method.close()
        dist.barrier()
        return {
            "ends_s": ends,
            "losses": torch.stack(losses).tolist(),
            "cpu_s": cpu_s,
            "sent_bytes": None if sent is None else (read_counter() or 0) - sent,
            "wire_bytes": counted,
        }

    def evaluate(self) -> dict[str, Any]:
        """The loss of every copy, each worker a share of them."""
        asked, rank, size = self._asked, self._asked.rank, self._asked.size
        digests = [_digest(flat) for _, flat in self._snapshots]
        if not self._method.is_replicated or rank == 0:
            np.save(
                _snapshot_path(asked.directory, rank), torch.stack([s for _, s in self._snapshots])
            )
        dist.barrier()
        sources = range(1 if self._method.is_replicated else size)
        kept = [np.load(_snapshot_path(asked.directory, each), mmap_mode="r") for each in sources]
        held_out = torch.from_numpy(
            read_samples(make_text(self._workload, self._workload.held_out, part=1), self._workload)
        )
        found: dict[int, float] = {}
        model = make_model(self._workload)
        for place, (step, _) in enumerate(self._snapshots):
            if place % size == rank:
                mean = np.mean([each[place] for each in kept], axis=0)
                nn.utils.vector_to_parameters(torch.from_numpy(mean), model.parameters())
                with torch.no_grad():
                    found[step] = loss_of(model, held_out).item()
        dist.barrier()
        with suppress(FileNotFoundError):
            _snapshot_path(asked.directory, rank).unlink()
        return {"held_out": found, "digests": digests, "is_replicated": self._method.is_replicated}

    def _keep_weights(self, step: int) -> None:
        if step % self._asked.every == 0 or step == self._asked.steps:
            weights = [weight.detach().flatten() for weight in self._method.weights(self._model)]
            self._snapshots.append((step, torch.cat(weights)))


def make_model(workload: Workload) -> nn.Module:
    """Yunlu's own transformer."""
    return CausalTransformer(
        vocabulary=VOCABULARY, max_length=workload.length, **workload.model_args()
    )


def my_samples(workload: Workload, steps: int, rank: int, size: int) -> Tensor:
    """Of every step; no sample comes twice."""
    batch = workload.host_batch * size
    blocks = read_samples(make_text(workload, steps * batch, part=0), workload)
    shares = blocks.reshape(steps, size, workload.host_batch, -1)
    return torch.from_numpy(shares[:, rank].copy())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over the tokens."""
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def decay_groups(model: nn.Module, decay: float) -> Sequence[dict[str, Any]]:
    """Biases and norms do not decay."""
    weights = list(model.parameters())
    return [
        {"params": [each for each in weights if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in weights if each.ndim < 2], "weight_decay": 0.0},
    ]


def set_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """It grows for a few steps, and stays: as in Yunlu's schedule."""
    for group in optimizer.param_groups:
        group["lr"] = workload.lr * min(1.0, (step + 1) / (workload.warmup + 1))


def read_counter() -> int | None:
    """Bytes that this host sent so far; none where the cable has another name."""
    return int(_COUNTER.read_text()) if _COUNTER.exists() else None


def _digest(flat: Tensor) -> str:
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def _snapshot_path(directory: Path, rank: int) -> Path:
    return directory / f"weights-{rank}.npy"


if __name__ == "__main__":
    main()
