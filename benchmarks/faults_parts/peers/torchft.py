"""One replica group of torchft, written as its own example is: state comes from the other replicas."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# In the benchmark's environment only.
import torchft  # pyright: ignore[reportMissingImports]
from torchft.checkpointing.pg_transport import (  # pyright: ignore[reportMissingImports]
    PGTransport,
)

from benchmarks.faults_parts.journal import Pen
from benchmarks.faults_parts.peers.common import Training

if TYPE_CHECKING:
    from torch import nn


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--timeout", type=float, required=True, help="of a collective, in s")
    asked = parser.parse_args()
    training = Training(asked.directory)
    pen = Pen(asked.directory / f"journal-{asked.replica}.jsonl")
    store = dist.TCPStore(asked.address, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=asked.timeout)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    group = torchft.ProcessGroupGloo(timeout=timeout)
    manager = torchft.Manager(
        pg=group,
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=f"replica-{asked.replica}",
        rank=0,
        world_size=1,
        store_addr=asked.address,
        store_port=store.port,
        lighthouse_addr=asked.lighthouse,
        hostname=asked.address,
        timeout=timedelta(seconds=30),
    )
    model = training.model
    optimizer = torchft.Optimizer(manager, training.optimizer(model))
    pen.start(asked.replica)
    while True:
        optimizer.zero_grad()  # begins a quorum
        step = manager.current_step()
        # torchft's sampler gives each replica group a fixed share of the data.
        samples = training.workload.samples_of(step)[asked.replica :: asked.replicas]
        training.loss(model, samples).backward()
        average(manager, model)
        optimizer.step()  # applied only where all who took part agree
        taking_part = manager.is_participating()
        if manager.current_step() > step and taking_part:
            quorum = str(manager._quorum_id)
            size = manager.num_participants()
            pen.complete(manager.current_step() - 1, group=quorum, size=size, samples=samples)


def average(manager: Any, model: nn.Module) -> None:
    """All gradients in one piece: when a collective times out, torchft 0.2.0's own DDP falls over."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


if __name__ == "__main__":
    main()
