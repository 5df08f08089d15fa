"""Optimisers: torch's own; LAMB, LARS and 8-bit states from other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from yunlu.core.errors import ModelError, TrainingError, missing_part
from yunlu.training.optim.frozen_adam import FrozenAdam
from yunlu.training.optim.fused_adam import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from yunlu.planning.plan import Kernel
    from yunlu.spec.train import OptimizerSpec

AnyOptimizer: TypeAlias = torch.optim.Optimizer | FusedAdam

_DEVICES = {"cpu", "cuda"}
"""Devices where torch has a kernel for all weights at once."""


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
    # torch couples the weight decay of SGD and Adam with the gradient: that is the L2 penalty.
    coupled = spec.name in {"sgd", "momentum", "adam"}
    groups = _groups(model, l2 if coupled else weight_decay)
    if spec.state == "8bit":
        return _eight_bit(groups, spec, lr=lr)
    available = kernels_for(model, spec)
    chosen = kernel if kernel in available else available[0]
    options = {"fused": chosen == "fused", "foreach": chosen == "foreach"}
    match spec.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, **options)
        case "momentum":
            return torch.optim.SGD(
                groups, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov, **options
            )
        case "adam" | "adamw":
            return _adam(groups, spec, lr=lr, options=options, freezable=freezable)
        case "lamb" | "lars":
            return _layerwise(groups, spec, lr=lr)


def _adam(
    groups: list[dict[str, Any]],
    spec: OptimizerSpec,
    *,
    lr: float,
    options: dict[str, bool],
    freezable: bool,
) -> AnyOptimizer:
    decoupled = spec.name == "adamw"
    if options["fused"]:
        kind = FrozenAdam if freezable else FusedAdam
        return kind(groups, lr=lr, betas=spec.betas, eps=spec.eps, decoupled=decoupled)
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    return plain(groups, lr=lr, betas=spec.betas, eps=spec.eps, **options)


def kernels_for(model: nn.Module | Sequence[Tensor], spec: OptimizerSpec) -> list[Kernel]:
    """Available optimiser kernels for these weights, the likely fastest first."""
    if spec.name in {"lamb", "lars"} or spec.state == "8bit":
        return ["single"]
    trained = _trained(model)
    if any(weight.device.type not in _DEVICES for weight in trained):
        return ["single"]
    # The fused kernel takes real numbers only; without it, updates take a third of a small model's step.
    if all(weight.is_floating_point() for weight in trained):
        return ["fused", "foreach", "single"]
    return ["foreach", "single"]


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


def _eight_bit(
    groups: list[dict[str, Any]], spec: OptimizerSpec, *, lr: float
) -> torch.optim.Optimizer:
    """Adam with two bytes of state per weight instead of eight (Dettmers et al. 2022, section 2)."""
    if spec.name not in {"adam", "adamw"}:
        raise TrainingError(
            f"train.optimizer.state=8bit supports adam and adamw, not {spec.name}.",
            hint="Use adamw, or remove train.optimizer.state.",
        )
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # noqa: PLC0415
    except ImportError as error:
        raise missing_part("bitsandbytes", "optimizers", "train.optimizer.state=8bit") from error

    class Adam8bit(AdamW8bit):
        def state_dict(self) -> dict[str, Any]:
            # The library nests its tensors one level deeper; a checkpoint holds them by name.
            return torch.optim.Optimizer.state_dict(self)

    optimizer = Adam8bit(groups, lr=lr, betas=spec.betas, eps=spec.eps)
    if spec.name == "adam":
        _couple_decay(optimizer)
    return optimizer


def _couple_decay(optimizer: torch.optim.Optimizer) -> None:
    """Couple weight decay to the gradient: the library's Adam decouples it, as AdamW."""
    amounts = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0

    def penalise(*_: Any) -> None:
        for group, amount in zip(optimizer.param_groups, amounts, strict=True):
            for weight in group["params"] if amount else ():
                if weight.grad is not None:
                    weight.grad.add_(weight.detach(), alpha=amount)

    optimizer.register_step_pre_hook(penalise)
