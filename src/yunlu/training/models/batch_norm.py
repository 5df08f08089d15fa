"""Batch normalisation of a single sample: the last step of an epoch may have only one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from torch import Tensor, nn

SINGLE_SAMPLE = "_yunlu_alone"


def allow_single_samples(model: nn.Module) -> None:
    """Allow batch normalisation to train on one value per channel, which has no variance.

    It then uses its running statistics; torch would raise an error.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.register_forward_pre_hook(_use_running_statistics)
            module.register_forward_hook(_restore_training, always_call=True)


def _use_running_statistics(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if module.training and values.ndim > 1 and values.numel() == values.shape[1]:
        module.training = False
        setattr(module, SINGLE_SAMPLE, True)


def _restore_training(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    if module.__dict__.pop(SINGLE_SAMPLE, False):
        module.training = True
