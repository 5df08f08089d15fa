"""Steps of tiny models on shares of a batch, and the same steps by one process on the whole of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.training.communication.allreducer import TorchAllReducer
from yunlu.training.models.networks import ConvNet
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.optim.fused_adam import FusedAdam
from yunlu.training.parallel.sync_batch_norm import uncounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.training.parallel.world import World

SAMPLES = 8


class Branching(nn.Module):
    """One weight that nobody uses, and one that only samples with a positive first value do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.idle = nn.Linear(7, 7)
        self.rare = nn.Linear(7, 7)
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values).relu()
        if (values[:, 0] > 0).any():
            hidden = hidden + self.rare(hidden) * (values[:, :1] > 0)
        return self.layers(hidden)


def build(kind: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(1)
    if kind == "transformer":
        return CausalTransformer(vocabulary=13, max_length=6, width=8, layers=3, heads=2)
    if kind == "cnn":
        return ConvNet(1, 3, channels=[4, 5], dropout=0.0)
    if kind == "branching":
        return Branching()
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step; of the transformer's targets some are ignored, unevenly."""
    source = torch.Generator().manual_seed(step)
    if kind == "transformer":
        ids = torch.randint(13, (SAMPLES, 6), generator=source)
        kept = torch.rand(SAMPLES, 6, generator=source) < torch.linspace(0.2, 1, SAMPLES)[:, None]
        kept[0, 0] = True
        return ids, torch.where(kept, ids.roll(-1, 1), -100)
    targets = torch.randint(3, (SAMPLES,), generator=source)
    if kind == "cnn":
        return torch.randn(SAMPLES, 1, 6, 6, generator=source), targets
    values = torch.randn(SAMPLES, 5, generator=source)
    values[:, 0] = -values[:, 0].abs()
    values[0, 0] = step % 2 - 0.5
    return values, targets


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, *, items: int) -> Tensor:
    """The sum over some samples, as their part of the mean over all."""
    scores = model(inputs)
    sums = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
    return sums / items


def micro_batches(
    kind: str, step: int, *, micros: int, replica: int, replicas: int
) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
    """A replica's part of each micro-batch; a sample that does not count where it has none."""
    inputs, targets = batch(kind, step)
    items = int((targets != -100).sum())
    for whole in torch.arange(SAMPLES).tensor_split(micros):
        mine = whole.tensor_split(replicas)[replica]
        counts = len(mine) > 0
        mine = mine if counts else torch.tensor([0])
        yield inputs[mine], targets[mine], items, counts


def accumulate(
    model: nn.Module,
    kind: str,
    step: int,
    *,
    micros: int,
    replica: int = 0,
    replicas: int = 1,
    before: Callable[[bool], None] = lambda _last: None,
) -> float:
    """Forward and backward over a step's micro-batches; our part of its loss."""
    total, device = 0.0, next(model.parameters()).device
    parts = micro_batches(kind, step, micros=micros, replica=replica, replicas=replicas)
    for number, (inputs, targets, items, counts) in enumerate(parts):
        with nullcontext() if counts else uncounted():
            loss = loss_of(model, inputs.to(device), targets.to(device), items=items) * counts
            before(number == micros - 1)
            loss.backward()
        total += loss.item()
    return total


def adam(weights: Sequence[Tensor]) -> FusedAdam:
    """Without the compiler that torch's own import: a second in each process."""
    groups: list[dict[str, Any]] = [{"params": list(weights), "weight_decay": 0.1}]
    return FusedAdam(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, decoupled=True)


def alone(
    kind: str, *, steps: int, micros: int, model: nn.Module | None = None
) -> tuple[list[float], list[Tensor | None], nn.Module]:
    """What one process comes to: its losses, the gradients of its first step, and the model."""
    model = build(kind) if model is None else model
    optimizer = adam([weight for weight in model.parameters() if weight.requires_grad])
    losses: list[float] = []
    first: list[Tensor | None] = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(accumulate(model, kind, step, micros=micros))
        if step == 0:
            first = copies([weight.grad for weight in model.parameters()])
        optimizer.step()
    return losses, first, model


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().to("cpu", copy=True) for tensor in tensors]


def furthest(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest difference between two lists of tensors; infinite where only one has a tensor."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            return float("inf")
        if one is not None and other is not None and one.numel():
            worst = max(worst, (one.cpu() - other.cpu()).abs().max().item())
    return worst


def summation_of(world: World) -> TorchAllReducer:
    """Sums by torch over the replicas of a world."""
    return TorchAllReducer(world.group("dp"), world.wait_for)
