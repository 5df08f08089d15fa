"""Model, data and optimiser of the peers' scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from benchmarks.faults_parts.workload import SEED, VOCABULARY, Workload, read_blocks
from yunlu.training.models.transformer import CausalTransformer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


class Training:
    """The same for every peer: seeded weights, the blocks, AdamW."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.workload = Workload(**json.loads((directory / "workload.json").read_text()))
        self.blocks = torch.from_numpy(read_blocks(directory / "text.txt", self.workload))
        self.model = CausalTransformer(
            vocabulary=VOCABULARY,
            max_length=self.workload.length,
            **self.workload.model_args(),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """With torch's fused kernel."""
        return torch.optim.AdamW(model.parameters(), lr=self.workload.lr, fused=True)

    def loss(self, model: nn.Module, samples: list[int]) -> Tensor:
        """The mean over the tokens of these samples."""
        blocks = self.blocks[torch.tensor(samples)]
        scores = model(blocks[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), blocks[:, 1:].flatten())
