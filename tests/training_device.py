"""The device on which tests train: the CPU, or the accelerator that ``YUNLU_TEST_DEVICE`` names."""

from __future__ import annotations

import os

import torch
from torch import nn

from yunlu.training.device import open_device

KIND = os.environ.get("YUNLU_TEST_DEVICE", "cpu")
DEVICE = torch.device(KIND)


def device_of(rank: int) -> torch.device:
    """The device of a rank, made its current one: for processes that train together."""
    return open_device(KIND, rank)


def gradient_norm(model: nn.Module) -> float:
    """What the engine tells its precision before each update."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return float(nn.utils.get_total_norm(gradients))
