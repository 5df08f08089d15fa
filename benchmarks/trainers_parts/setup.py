"""What every contender is given: the same model, the same samples, the same loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.trainers_parts.marks import Marks
from benchmarks.trainers_parts.workloads import (
    GPT_LENGTH,
    GPT_TOKENS,
    MLP_CLASSES,
    MLP_INPUTS,
    MLP_WIDTH,
    SEED,
    WORKLOADS,
)

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
LOG_EVERY = 50


class Marked(nn.Module):
    """A model that notes when it is called."""

    def __init__(self, inner: nn.Module, marks: Marks) -> None:
        super().__init__()
        self.inner = inner
        self.marks = marks

    def forward(self, x: Tensor) -> Tensor:
        """The inner model's answer."""
        if self.training:
            self.marks.add()
        return self.inner(x)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's own, which also keeps what it gave. The name is the usual one: tools look at it."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        loss = super().forward(input, target)
        self.marks.see(loss, target.numel() if self.reduction == "sum" else 1)
        return loss


class TokenLoss(CrossEntropyLoss):
    """The same over every token."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return super().forward(input.flatten(0, 1), target.flatten())


class Pairs(Dataset[Any]):
    """Inputs and targets, fetched a batch at a time: the leanest that a ``DataLoader`` can take."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def as_it_is(batch: Any) -> Any:
    """The collate function of samples that are fetched whole."""
    return batch


def as_named(batch: Any) -> dict[str, Tensor]:
    """The same for HF Trainer, which calls models by name."""
    return {"x": batch[0], "labels": batch[1]}


@dataclass(kw_only=True)
class Setup:
    """One contender's share of a workload."""

    workload: str
    steps: int
    pinned: bool
    """Everything that can be equal is; else each tool does as it does by default."""
    threads: int
    directory: Path
    marks: Marks = field(default_factory=Marks)

    def __post_init__(self) -> None:
        if self.pinned:
            torch.set_num_threads(self.threads)
        about = WORKLOADS[self.workload]
        self.batch, self.lr = about.batch, about.lr
        self.dataset = Pairs(self._read("inputs"), self._read("targets"))
        self.order: list[int] = self._read("order").tolist()
        torch.manual_seed(SEED)
        self.model = Marked(build_net(self.workload), self.marks)
        self.loss = (CrossEntropyLoss if self.workload == "mlp" else TokenLoss)(self.marks)

    def loader(self) -> DataLoader[Any]:
        """The samples of every step, in the common order."""
        return DataLoader(
            self.dataset, batch_size=self.batch, sampler=self.order, collate_fn=as_it_is
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW; its fused kernel where settings are pinned, else torch's default."""
        fused = True if self.pinned else None
        return torch.optim.AdamW(decay_groups(self.model), lr=self.lr, fused=fused)

    def _read(self, part: str) -> Tensor:
        return torch.from_numpy(np.load(self.directory / f"{self.workload}-{part}.npy"))


def build_net(workload: str) -> nn.Module:
    """The model of a workload; its weights follow torch's seed."""
    if workload == "mlp":
        layers: list[nn.Module] = []
        for wide in (MLP_INPUTS, MLP_WIDTH, MLP_WIDTH):
            layers += [nn.Linear(wide, MLP_WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(MLP_WIDTH, MLP_CLASSES))
    from yunlu.training.models.transformer import CausalTransformer  # noqa: PLC0415

    return CausalTransformer(
        vocabulary=GPT_TOKENS, max_length=GPT_LENGTH, width=384, layers=6, heads=6
    )


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    weights = list(model.parameters())
    return [
        {"params": [each for each in weights if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in weights if each.ndim < 2], "weight_decay": 0.0},
    ]
