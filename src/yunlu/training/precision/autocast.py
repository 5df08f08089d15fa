"""Mixed precision of a run: autocast, loss scaling, adaptive precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.core.errors import JobError
from yunlu.training.device import is_accelerator, kind_of
from yunlu.training.precision.adaptive import Adaptive, PrecisionChange, make_loss_scale

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.optim import Optimizer


# FP8 applies to converted products only; everything else runs in BF16.
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


_NOTHING = nullcontext()


class Precision:
    """Weights stay in FP32; autocast lowers the arithmetic; FP16 gradients are scaled.

    With ``adapt``, modules whose values exceed the range of BF16 or FP16 compute in FP32. Autocast
    keeps a lowered copy of every weight until the forward pass ends, unless ``keeps_lowered_weights``
    is false: for weights that are gathered, used and freed, those would be the whole model.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        adapt: bool = False,
        keeps_lowered_weights: bool = True,
    ) -> None:
        check_precision(name, device)
        self._keeps_lowered_weights = keeps_lowered_weights
        self.name, self.device = name, device
        self._type = _TYPES.get(name)
        self._scale = make_loss_scale(device) if name == "fp16" else None
        self._adaptive = (
            Adaptive(name, _TYPES[name], device) if adapt and name in {"bf16", "fp16"} else None
        )
        self._applied, self._seen_at = True, 1.0
        if self._type is not None and device.type == "cpu":
            keep_in_fp32()

    def attach(self, model: nn.Module, *copies: nn.Module) -> None:
        """Attach to a model on its device; copies of it, such as a moving average, follow its changes."""
        if self._adaptive is not None:
            self._adaptive.attach(model, *copies)

    def detach(self) -> None:
        """Restore the attached models."""
        if self._adaptive is not None:
            self._adaptive.detach()

    def forward(self) -> AbstractContextManager[Any]:
        """Context of the forward pass."""
        if self.name == "tf32":
            return tf32_products()
        if self._type is None:
            return _NOTHING
        # Evaluations are not probed: they run as the model will be used.
        if self._adaptive is not None and self._adaptive.is_due and torch.is_grad_enabled():
            return self._adaptive.probe()
        return torch.autocast(
            self.device.type, dtype=self._type, cache_enabled=self._keeps_lowered_weights
        )

    def backward(self, loss: Tensor) -> None:
        """Backward pass, with loss scaling for FP16."""
        scaled = loss if self._scale is None else self._scale.scale(loss)
        with tf32_products() if self.name == "tf32" else _NOTHING:
            scaled.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, before clipping."""
        if self._scale is not None:
            self._scale.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights unless FP16 gradients overflowed; true if applied."""
        if self._adaptive is not None:
            self._adaptive.before_update()
        if self._scale is None:
            optimizer.step()
            return True
        self._seen_at = self._scale.value
        self._applied = self._scale.step(optimizer)
        return self._applied

    def note_norm(self, norm: float) -> None:
        """The gradient norm of this step, which the host has waited for: it tells of an overflow."""
        if self._scale is not None:
            self._scale.note_norm(norm)

    def skip(self) -> None:
        """Skip a step, instead of ``step``."""
        self._applied = False
        if self._scale is not None:
            self._seen_at = self._scale.value
            self._scale.skip()

    def observe(self, *, step: int, loss: float) -> list[PrecisionChange]:
        """Process a finished step; returns the precision changes it caused."""
        if self._adaptive is None:
            return []
        applied, self._applied = self._applied, True
        return self._adaptive.observe(
            step=step,
            loss=loss,
            applied=applied,
            seen_at=self._seen_at,
            scale=self._scale,
        )

    @property
    def skips_overflow(self) -> bool:
        """Whether an infinite gradient skips the step instead of being an error."""
        return self._scale is not None

    @property
    def scale(self) -> float | None:
        """The loss scale, if any."""
        return None if self._scale is None else self._scale.value

    @property
    def skips(self) -> int:
        """Steps skipped so far because a gradient overflowed."""
        return 0 if self._scale is None else self._scale.skips

    @property
    def low_share(self) -> float | None:
        """Share of the candidate parameters in low precision; None without adaptation."""
        return None if self._adaptive is None else self._adaptive.low_share

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        parts = {"scale": self._scale, "adaptive": self._adaptive}
        return {name: part.state() for name, part in parts.items() if part is not None}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if self._scale is not None and "scale" in state:
            self._scale.restore(state["scale"])
        if self._adaptive is not None and "adaptive" in state:
            self._adaptive.restore(state["adaptive"])


@contextmanager
def tf32_products() -> Generator[None]:
    """Allow TF32 in FP32 matrix products inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_precision(name: str, device: torch.device) -> None:
    """Refuse a precision that the device does not support; a slow one is allowed."""
    missing = _missing(name, device)
    if missing is not None:
        raise JobError(
            f"train.precision: {name} needs {missing}; this device is {_describe(device)}.",
            hint="Use precision: auto, which picks a fast one for the device, or fp32.",
        )


def _missing(name: str, device: torch.device) -> str | None:
    """The missing requirement of a precision; None if supported."""
    if name == "fp32":
        return None
    needs = {
        "tf32": (_has_tf32, "an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"),
        "bf16": (_has_bf16, "a device with bfloat16"),
        "fp16": (_has_autocast, "a device with automatic mixed precision"),
        "fp8": (has_fp8, "a GPU with FP8 products (NVIDIA 8.9 or newer, AMD MI300 or newer)"),
    }
    has_it, need = needs[name]
    return None if has_it(device) else need


def _has_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type)


def _has_bf16(device: torch.device) -> bool:
    if not is_accelerator(device):
        return _has_autocast(device)
    return kind_of(device.type).has_bf16(device.index or 0)


def _has_tf32(device: torch.device) -> bool:
    return is_accelerator(device) and kind_of(device.type).has_tf32(device.index or 0)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies in FP8."""
    if not is_accelerator(device):
        return False
    return kind_of(device.type).fp8_problem(device.index or 0) is None


def _describe(device: torch.device) -> str:
    if not is_accelerator(device):
        return f"a {device.type}"
    return kind_of(device.type).describe(device.index or 0)


# Operators kept in FP32 under CPU autocast, which lets some follow their input type. On CUDA autocast runs
# norms, softmax, exponentials and losses in FP32. On the CPU it does so for the losses only: a layer norm or
# a ``log_softmax`` of BF16 scores gives BF16, three digits. These rules close the gap. (Batch norm is on
# neither list: its kernels sum in FP32 and round the result.)
_IN_FP32 = (
    "layer_norm",
    "group_norm",
    "rms_norm",
    "softmax.int",
    "log_softmax.int",
    "logsumexp",
    "exp",
    "pow.Tensor_Scalar",
)


_LSTM = ("lstm.input", "lstm.data")


@cache
def keep_in_fp32() -> torch.library.Library:
    """Add the missing rules to CPU autocast, once in a process; they last as long as it does."""
    rules = torch.library.Library("aten", "IMPL")
    for operator in _IN_FP32 if _lowers_lstm() else _IN_FP32 + _LSTM:
        torch.library.register_autocast(f"aten::{operator}", "cpu", torch.float32, lib=rules)
    return rules


def _lowers_lstm() -> bool:
    """Whether oneDNN has a low-precision LSTM here; autocast requests one anyway, and fails."""
    return (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )
