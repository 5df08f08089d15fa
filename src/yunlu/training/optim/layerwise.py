"""LAMB and LARS, whose rates follow the norm of each weight: from pytorch-optimizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.spec.optimizers import OptimizerSettings, OptimizerTraits

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _build(groups: list[dict[str, Any]], settings: OptimizerSettings, *, kind: str) -> Optimizer:
    try:
        import pytorch_optimizer as library  # noqa: PLC0415 (imports torch)
    except ImportError as error:
        purpose = f"train.optimizer={kind.lower()}"
        raise missing_part("pytorch-optimizer", "optimizers", purpose) from error
    return getattr(library, kind)(groups, lr=settings.lr, **settings.hyperparameters)


LAMB = OptimizerTraits(
    build=partial(_build, kind="Lamb"),
    state_bytes=8,
    lr=2e-3,
    fine_tuning_lr=1e-4,
    weight_decay=0.01,
    decays_by="weight_decay",
    scaling="sqrt",
    hyperparameters={"betas": (0.9, 0.999), "eps": 1e-8},
    needs_whole_weights=True,
)

LARS = OptimizerTraits(
    build=partial(_build, kind="LARS"),
    state_bytes=4,
    lr=1.0,
    weight_decay=1e-4,
    decays_by="weight_decay",
    scaling="linear",
    hyperparameters={"momentum": 0.9, "nesterov": False},
    needs_whole_weights=True,
)
