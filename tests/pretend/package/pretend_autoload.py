"""Torch calls this when it is imported (entry point torch.backends), as it does with torch_npu."""

from __future__ import annotations


def autoload() -> None:
    """Make the device, unless its import is what imports torch."""
    import pretend_accelerator  # noqa: F401
