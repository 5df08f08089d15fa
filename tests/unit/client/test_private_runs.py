"""A run that trains in a user's own process is private, too, and leaves the process as it was."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import yunlu


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_files_of_a_run_in_this_process_are_private(own_home: Path) -> None:
    import torch
    from torch import nn

    inputs = torch.randn(32, 4)
    streams = sys.stdout, sys.stderr
    before = os.umask(0)
    try:
        targets = (inputs.sum(dim=1) > 0).long()
        loss = nn.functional.cross_entropy
        run = yunlu.train(
            model=nn.Linear(4, 2), data=(inputs, targets), loss=loss, steps=3, batch=16
        )
        umask_after = os.umask(0)
    finally:
        os.umask(before)
    assert run.wait().state == "finished"
    assert umask_after == 0
    assert (sys.stdout, sys.stderr) == streams
    modes = {
        str(path): (path.is_dir(), path.stat().st_mode & 0o777)
        for path in (own_home, *own_home.rglob("*"))
    }
    assert any(path.endswith(".safetensors") for path in modes)
    assert any("tfevents" in path for path in modes)
    assert {path: mode for path, (is_dir, mode) in modes.items()
            if mode != (0o700 if is_dir else 0o600)} == {}  # fmt: skip
