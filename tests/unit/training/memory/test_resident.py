"""The peak of the process is remembered after the memory is gone."""

from __future__ import annotations

import torch

from yunlu.training.memory.peak import peak_resident_bytes

SIZE = 256 * 2**20


def test_a_peak_is_remembered_after_its_memory_is_gone() -> None:
    before = peak_resident_bytes()
    torch.ones(before + SIZE, dtype=torch.uint8)
    assert peak_resident_bytes() > before + SIZE // 2
