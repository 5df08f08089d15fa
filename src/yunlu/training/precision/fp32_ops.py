"""Operators kept in FP32 under CPU autocast, which lets some follow their input type.

On CUDA autocast runs norms, softmax, exponentials and losses in FP32. On the CPU it does so for the
losses only: a layer norm or a ``log_softmax`` of BF16 scores gives BF16, three digits. The rules
below close the gap. (Batch norm is on neither list: its kernels sum in FP32 and round the result.)
"""

from __future__ import annotations

from functools import cache

import torch

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
