"""DDP by hand, for torchrun: a checkpoint every few steps, from which every restart goes on."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults_parts.journal import Pen
from benchmarks.faults_parts.peers.common import Training


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--timeout", type=float, required=True, help="of the process group, in s")
    asked = parser.parse_args()
    training = Training(asked.directory)
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    pen = Pen(asked.directory / f"journal-{rank}.jsonl")
    pen.start(rank)
    model = DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    optimizer = training.optimizer(model)
    checkpoint = asked.directory / "checkpoint.pt"
    step = _load(checkpoint, training.model, optimizer)
    while True:
        samples = training.workload.samples_of(step)
        loss = training.loss(model, samples[rank::size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            pen.complete(step, group=str(os.getpid()), size=size, samples=samples)
        step += 1
        if rank == 0 and step % training.workload.checkpoint_every == 0:
            _save(checkpoint, step, training.model, optimizer)


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    aside = path.with_suffix(".new")
    torch.save(state, aside)
    aside.replace(path)


if __name__ == "__main__":
    main()
