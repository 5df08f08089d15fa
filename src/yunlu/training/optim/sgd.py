"""Stochastic gradient descent, plain and with momentum: torch's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.spec.optimizers import OptimizerSettings, OptimizerTraits

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _build(groups: list[dict[str, Any]], settings: OptimizerSettings) -> Optimizer:
    import torch  # noqa: PLC0415 (traits are read without torch)

    return torch.optim.SGD(
        groups, lr=settings.lr, **settings.hyperparameters, **settings.torch_kernel
    )


SGD = OptimizerTraits(
    build=_build,
    state_bytes=0,
    lr=0.1,
    decays_by="l2",
    scaling="linear",
    kernels=("fused", "foreach", "single"),
)

MOMENTUM = OptimizerTraits(
    build=_build,
    state_bytes=4,
    lr=0.05,
    decays_by="l2",
    scaling="linear",
    hyperparameters={"momentum": 0.9, "nesterov": False},
    kernels=("fused", "foreach", "single"),
)
