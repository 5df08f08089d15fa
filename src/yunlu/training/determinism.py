"""Deterministic algorithms."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

_settings: Any = cast("Any", torch)._C


def set_deterministic(mode: bool, *, warn_only: bool = True) -> None:
    """As ``torch.use_deterministic_algorithms``, without importing Inductor to configure it.

    The import takes a second and 70 MB; ``compile_model`` configures the compiler where it is used.
    """
    _settings._set_deterministic_algorithms(mode, warn_only=warn_only)
    compiler: Any = sys.modules.get("torch._inductor.config")
    if compiler is not None:
        compiler.deterministic = mode
