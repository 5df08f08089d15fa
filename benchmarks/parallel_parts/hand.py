"""What one would write with torch alone, one function per layout; started by torchrun on two processes.

Each is given the same weights and the same tokens. They do what Yunlu does at a step (sum the loss
over the true count, clip the norm, AdamW) and nothing more: no log but a list, no checkpoint.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes: B batch, L length, D width
from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from benchmarks.parallel_parts.workload import CLIP_NORM, MICRO_BATCH, WEIGHT_DECAY, WORKLOAD
from yunlu.training.models.transformer import CausalTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    TrainStep = Callable[[Tensor], Tensor]
    """Takes the tokens of a step; gives this process's share of the loss."""


def main() -> None:
    """Train, and write down when each step ended and what its loss was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=MAKERS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("record", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = CausalTransformer(**json.loads((asked.directory / "model.json").read_text()))
    model.load_state_dict(load_file(asked.directory / "weights.safetensors"))
    take = MAKERS[asked.layout](model)
    losses: list[Tensor] = []
    ends: list[float] = []
    for tokens in torch.from_numpy(np.load(asked.directory / "tokens.npy")):
        losses.append(take(tokens).detach())
        ends.append(time.time())
    total = torch.stack(losses)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        asked.record.write_text(json.dumps({"at": ends, "losses": total.tolist()}))
    dist.destroy_process_group()


def make_dp(model: nn.Module) -> TrainStep:
    """DistributedDataParallel."""
    return make_averaging(DistributedDataParallel(model, gradient_as_bucket_view=True))


def make_fsdp(model: CausalTransformer) -> TrainStep:
    """FSDP2, a unit for each layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return make_averaging(model)


def make_averaging(model: nn.Module) -> TrainStep:
    """Of replicas whose gradients are averaged over the processes: times their number, a sum."""
    optimizer = make_optimizer(model.parameters())

    def take(tokens: Tensor) -> Tensor:
        loss = share_of_loss(model, my_share(tokens))
        (loss * dist.get_world_size()).backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return take


def make_tp(model: CausalTransformer) -> TrainStep:
    """Megatron's cut (Shoeybi et al. 2019): columns, then rows; embedding and head stay whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel, RowwiseParallel
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            **{f"attention.{name}": columns() for name in ("query", "key", "value")},
            "attention.out": rows(),
            "feed.up": columns(),
            "feed.down": rows(),
        }
        parallelize_module(layer, mesh, plan)
    cut = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    parts = [weight for weight in cut if weight.placements[0].is_shard()]
    same = [weight for weight in cut if weight.placements[0].is_replicate()]
    whole = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    # torch's kernels take no mixture of the two.
    optimizer = torch.optim.AdamW(
        [*decay_groups(cut), *decay_groups(whole)], lr=WORKLOAD.lr, fused=True
    )

    def take(tokens: Tensor) -> Tensor:
        loss = share_of_loss(model, tokens)
        loss.backward()
        clip_over(mesh.get_group(), parts, [*same, *whole])
        optimizer.step()
        optimizer.zero_grad()
        return loss / dist.get_world_size()

    return take


class First(nn.Module):
    """The embedding and the first half of the layers."""

    def __init__(self, model: CausalTransformer, count: int) -> None:
        super().__init__()
        self.embedding, self.layers = model.embedding, model.layers[:count]

    def forward(self, ids_BL: Tensor) -> Tensor:
        """Vectors."""
        x_BLD, rotation = self.embedding(ids_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, causal=True, rotation=rotation)
        return x_BLD


class Last(nn.Module):
    """The other half, and the head."""

    def __init__(self, model: CausalTransformer, count: int) -> None:
        super().__init__()
        assert model.head is not None
        assert model.embedding.angles is not None
        self.layers, self.norm, self.head = model.layers[count:], model.norm, model.head
        self.angles: Tensor
        self.register_buffer("angles", model.embedding.angles, persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Scores."""
        for layer in self.layers:
            x_BLD = layer(x_BLD, causal=True, rotation=self.angles[: x_BLD.shape[1]])
        return self.head(self.norm(x_BLD))


def make_pp(model: CausalTransformer) -> TrainStep:
    """Two stages of as many layers each, micro-batches in the order of 1F1B."""
    rank, half = dist.get_rank(), len(model.layers) // 2
    part = First(model, half) if rank == 0 else Last(model, half)
    stage = PipelineStage(part, rank, dist.get_world_size(), torch.device("cpu"))
    count = WORKLOAD.batch // MICRO_BATCH["pp2"]
    schedule = Schedule1F1B(stage, count, loss_fn=mean_of_all, scale_grads=False)
    weights = list(part.parameters())
    optimizer = make_optimizer(weights)

    def take(tokens: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses)
        clip_over(None, weights, [])
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return take


MAKERS: dict[str, Callable[[Any], TrainStep]] = {
    "dp2": make_dp,
    "fsdp2": make_fsdp,
    "tp2": make_tp,
    "pp2": make_pp,
}


def my_share(tokens: Tensor) -> Tensor:
    """This replica's samples of a step."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def share_of_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of these samples, as a part of the mean over the whole step."""
    return mean_of_all(model(tokens[:, :-1]), tokens[:, 1:])


def mean_of_all(scores: Tensor, targets: Tensor) -> Tensor:
    """Summed here, divided by the items of the whole step."""
    loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / (WORKLOAD.batch * WORKLOAD.length)


def make_optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel; matrices decay."""
    return torch.optim.AdamW(decay_groups(list(weights)), lr=WORKLOAD.lr, fused=True)


def decay_groups(weights: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Biases and norms do not."""
    return [
        {"params": [each for each in weights if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in weights if each.ndim < 2], "weight_decay": 0.0},
    ]


def clip_over(group: Any, parts: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    """Clip by the norm over all processes: parts are summed, what all hold is counted once."""
    gradients = [local(weight.grad) for weight in parts]
    square = get_total_norm(gradients).square()
    dist.all_reduce(square, group=group)
    if whole:
        same = [local(weight.grad) for weight in whole]
        square += get_total_norm(same).square()
        gradients += same
    scale = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)


def local(tensor: Any) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # noqa: TID251 (a script, not the package)
    main()
