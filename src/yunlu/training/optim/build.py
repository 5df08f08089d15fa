"""The optimiser that a job names, over the weights of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils import _foreach_utils

from yunlu.core.errors import ModelError, TrainingError
from yunlu.spec.optimizers import OptimizerSettings
from yunlu.training.optim.fused_adam import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yunlu.spec.optimizers import Kernel
    from yunlu.spec.train import OptimizerSpec

AnyOptimizer: TypeAlias = torch.optim.Optimizer | FusedAdam


def build_optimizer(
    model: nn.Module | Sequence[Tensor],
    spec: OptimizerSpec,
    *,
    lr: float,
    weight_decay: float,
    l2: float,
    kernel: Kernel = "fused",
    freezable: bool = False,
) -> AnyOptimizer:
    """Build the optimiser over the trainable weights of a model, or over these weights.

    Vectors get no weight decay. A ``freezable`` Adam can freeze its second moment (fused kernel only).
    A ``kernel`` that is not available falls back to the first of ``kernels_for``.
    """
    traits = spec.traits
    if spec.state == "8bit" and not traits.has_8bit_state:
        raise TrainingError(
            f"train.optimizer.state=8bit: {spec.name} has no 8-bit state.",
            hint="Use adamw, or remove train.optimizer.state.",
        )
    groups = _groups(model, l2 if traits.decays_by == "l2" else weight_decay)
    available = kernels_for(model, spec)
    settings = OptimizerSettings(
        lr=lr,
        hyperparameters=spec.hyperparameters,
        state=spec.state,
        kernel=kernel if kernel in available else available[0],
        is_freezable=freezable,
    )
    return traits.build(groups, settings)


def kernels_for(model: nn.Module | Sequence[Tensor], spec: OptimizerSpec) -> list[Kernel]:
    """Available optimiser kernels for these weights, the likely fastest first."""
    trained = _trained(model)
    if spec.state == "8bit":
        return ["single"]
    # Where torch has a kernel for all weights at once.
    devices = set(_foreach_utils._get_fused_kernels_supported_devices())  # pyright: ignore[reportPrivateUsage]
    if any(weight.device.type not in devices for weight in trained):
        return ["single"]
    # The fused kernel takes real numbers only; without it, updates take a third of a small model's step.
    is_real = all(weight.is_floating_point() for weight in trained)
    return [kernel for kernel in spec.traits.kernels if kernel != "fused" or is_real]


def _trained(model: nn.Module | Sequence[Tensor]) -> list[Tensor]:
    weights = model.parameters() if isinstance(model, nn.Module) else model
    return [weight for weight in weights if weight.requires_grad]


def _groups(model: nn.Module | Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    trained = _trained(model)
    if not trained:
        raise ModelError(
            "The model has no trainable weights.",
            hint="Check requires_grad, or the model's class.",
        )
    matrices = [weight for weight in trained if weight.ndim >= 2]
    vectors = [weight for weight in trained if weight.ndim < 2]
    groups = [(matrices, decay), (vectors, 0.0)]
    return [{"params": weights, "weight_decay": amount} for weights, amount in groups if weights]
