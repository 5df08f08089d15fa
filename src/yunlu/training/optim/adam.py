"""Adam and AdamW: torch's kernels, or states of 8 bits from bitsandbytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.spec.optimizers import OptimizerSettings, OptimizerTraits

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from yunlu.training.optim.fused_adam import FusedAdam


def _build(
    groups: list[dict[str, Any]], settings: OptimizerSettings, *, decoupled: bool
) -> Optimizer | FusedAdam:
    lr, hyperparameters = settings.lr, settings.hyperparameters
    if settings.state == "8bit":
        return _build_8bit(groups, settings, decoupled=decoupled)
    if settings.kernel == "fused":
        from yunlu.training.optim.fused_adam import FrozenAdam, FusedAdam  # noqa: PLC0415 (imports torch)

        kind = FrozenAdam if settings.is_freezable else FusedAdam
        return kind(groups, lr=lr, **hyperparameters, decoupled=decoupled)
    import torch  # noqa: PLC0415 (traits are read without torch)

    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    return plain(groups, lr=lr, **hyperparameters, **settings.torch_kernel)


def _build_8bit(
    groups: list[dict[str, Any]], settings: OptimizerSettings, *, decoupled: bool
) -> Optimizer:
    """Adam with two bytes of state per weight instead of eight (Dettmers et al. 2022, section 2)."""
    import torch  # noqa: PLC0415 (traits are read without torch)

    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # noqa: PLC0415
    except ImportError as error:
        raise missing_part("bitsandbytes", "optimizers", "train.optimizer.state=8bit") from error

    class Adam8bit(AdamW8bit):
        def state_dict(self) -> dict[str, Any]:
            # The library nests its tensors one level deeper; a checkpoint holds them by name.
            return torch.optim.Optimizer.state_dict(self)

    optimizer = Adam8bit(groups, lr=settings.lr, **settings.hyperparameters)
    if not decoupled:
        _couple_decay(optimizer)
    return optimizer


def _couple_decay(optimizer: Optimizer) -> None:
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


ADAMW = OptimizerTraits(
    build=partial(_build, decoupled=True),
    state_bytes=8,
    lr=1e-3,
    fine_tuning_lr=5e-5,
    weight_decay=0.01,
    decays_by="weight_decay",
    scaling="sqrt",
    hyperparameters={"betas": (0.9, 0.999), "eps": 1e-8},
    kernels=("fused", "foreach", "single"),
    has_8bit_state=True,
    can_freeze=True,
    has_mup=True,
    has_rate_laws=True,
)

# torch couples the weight decay of Adam with the gradient: that is the L2 penalty.
ADAM = replace(ADAMW, build=partial(_build, decoupled=False), weight_decay=0.0, decays_by="l2")
