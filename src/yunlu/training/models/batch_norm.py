"""Batch normalisation of a single sample: the last step of an epoch may hold no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from torch import Tensor, nn

ALONE = "_yunlu_alone"


def allow_single_samples(model: nn.Module) -> None:
    """Let batch normalisation train on one value per channel, which has no variance.

    Its running statistics then stand in for the batch's; torch would raise an error.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.register_forward_pre_hook(_stand_in)
            module.register_forward_hook(_stand_back, always_call=True)


def _stand_in(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if module.training and values.ndim > 1 and values.numel() == values.shape[1]:
        module.training = False
        setattr(module, ALONE, True)


def _stand_back(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    if module.__dict__.pop(ALONE, False):
        module.training = True
