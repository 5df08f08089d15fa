"""Promises of the pretend accelerator, each proved; a program for many, for each costs an import of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20


def test_devices_memory_and_counters(on_pretend: Callable[..., str]) -> None:
    on_pretend([PROGRAMS / "device.py"], memory=64 * MIB)


def test_streams_and_late_copies(on_pretend: Callable[..., str], tmp_path: Path) -> None:
    log = tmp_path / "races"
    on_pretend([PROGRAMS / "streams.py"], memory=64 * MIB, PRETEND_RACE_LOG=str(log))
    assert len(log.read_text().splitlines()) == 13


def test_kernels_models_and_mixed_precision(on_pretend: Callable[..., str]) -> None:
    on_pretend([PROGRAMS / "models.py"])


def test_groups_train_hang_and_abort(on_pretend: Callable[..., str]) -> None:
    assert "rank 0 is done" in on_pretend([PROGRAMS / "group.py"], memory=256 * MIB)


def test_names_and_float64(on_pretend: Callable[..., str]) -> None:
    on_pretend(
        """
import pytest, torch
import pretend_accelerator as pretend
assert torch.accelerator.device_count() == 3
assert (pretend.NAME, pretend.BACKEND) == ("gadget", "gadgetcl")
x = torch.ones(3, device="gadget:2")
assert x.gadget(0).device == torch.device("gadget:0")
for make in (x.double, lambda: torch.ones(2, dtype=torch.float64, device="gadget"), lambda: x.sum(dtype=torch.float64)):
    with pytest.raises(TypeError, match="no float64"):
        make()
assert torch.empty(4, device="gadget").isnan().all()
assert (x * 0.5 + torch.tensor(0.5, dtype=torch.float64)).tolist() == [1, 1, 1]
""",
        devices=3,
        name="gadget",
        PRETEND_NO_FLOAT64="1",
        PRETEND_POISON="1",
    )
