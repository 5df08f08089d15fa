"""Optimisers: torch's own, and LAMB and LARS from a kept library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import ModelError, missing_part

if TYPE_CHECKING:
    from torch import nn

    from yunlu.spec.train import OptimizerSpec


def build_optimizer(
    model: nn.Module, spec: OptimizerSpec, *, lr: float, weight_decay: float, l2: float
) -> torch.optim.Optimizer:
    """The optimiser over the trainable weights; biases and norms are not decayed."""
    # torch couples the weight decay of SGD and Adam with the gradient: that is the L2 penalty.
    coupled = spec.name in {"sgd", "momentum", "adam"}
    groups = _groups(model, l2 if coupled else weight_decay)
    # One kernel for all weights, where there is one: a third of a small model's step otherwise.
    fused = all(
        weight.is_floating_point() and weight.device.type in {"cpu", "cuda"}
        for group in groups
        for weight in group["params"]
    )
    match spec.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, fused=fused)
        case "momentum":
            return torch.optim.SGD(
                groups, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov, fused=fused
            )
        case "adam":
            return torch.optim.Adam(groups, lr=lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case "lamb" | "lars":
            return _layerwise(groups, spec, lr=lr)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise ModelError(
            "The model has no trainable weights.",
            hint="Check requires_grad, or the model's class.",
        )
    matrices = [weight for weight in trained if weight.ndim >= 2]
    vectors = [weight for weight in trained if weight.ndim < 2]
    groups = [(matrices, decay), (vectors, 0.0)]
    return [{"params": weights, "weight_decay": amount} for weights, amount in groups if weights]


def _layerwise(
    groups: list[dict[str, Any]], spec: OptimizerSpec, *, lr: float
) -> torch.optim.Optimizer:
    try:
        import pytorch_optimizer as library  # noqa: PLC0415
    except ImportError as error:
        raise missing_part(
            "pytorch-optimizer", "optimizers", f"train.optimizer={spec.name}"
        ) from error
    if spec.name == "lamb":
        return library.Lamb(groups, lr=lr, betas=spec.betas, eps=spec.eps)
    return library.LARS(groups, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov)
