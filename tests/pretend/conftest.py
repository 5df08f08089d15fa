"""Tests on the pretend accelerator: skipped where it cannot be built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.pretend.build import build, environment, run_on_pretend, why_not


@pytest.fixture(scope="session")
def pretend() -> None:
    """Build the device, once for all processes of the tests."""
    if reason := why_not():
        pytest.skip(reason)
    build()


@pytest.fixture
def pretend_env(pretend: None) -> dict[str, str]:
    """The environment of programs on two pretend NPUs of 1 GiB."""
    return environment()


@pytest.fixture
def on_pretend(pretend: None) -> Callable[..., str]:
    """Run a program on the device and return what it printed: ``on_pretend(code, devices=2)``."""

    def run(program: str | Sequence[str | Path], **settings: object) -> str:
        ended = run_on_pretend(program, **settings)  # type: ignore[arg-type]
        assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
        return ended.stdout

    return run
