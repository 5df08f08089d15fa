"""The training tests pass on the pretend accelerator as on the CPU; how they are counted: ``suite.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pretend.suite import CORE, ROOMS, Selection, run_tests

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.usefixtures("pretend")


def check(tests: Selection, folder: Path, *, least_share: float) -> None:
    """All pass, the share of those on the device is large enough, and nothing raced."""
    found = run_tests(folder, tests.arguments, devices=tests.devices, has_float64=tests.has_float64)
    told = found.describe()
    print(told)  # noqa: T201 - the figure, for whoever asks by `pytest -s`
    assert found.code == 0, found.output[-10_000:]
    assert len(found.on_device) >= least_share * len(found.training) > 0, told
    assert not (folder / "races").exists(), (folder / "races").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_the_core_of_the_training_tests_passes_on_the_device(name: str, tmp_path: Path) -> None:
    check(CORE[name], tmp_path, least_share=1.0)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", ROOMS)
def test_nine_of_ten_training_tests_run_on_the_device(name: str, tmp_path: Path) -> None:
    check(ROOMS[name], tmp_path, least_share=0.9)


def test_one_worker_learns_to_the_bit_as_on_the_cpu(on_pretend: Callable[..., str]) -> None:
    on_pretend([PROGRAMS / "training.py"], timeout=1200, PRETEND_POISON="1")
