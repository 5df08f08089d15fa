"""Shared by all tests: every run and every made data set goes to a place of the test's own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test asserts on time; in CI the same examples are drawn each time.
settings.register_profile("yunlu", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("yunlu")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("YUNLU_HOME", str(home))
    monkeypatch.setenv("YUNLU_LANG", "en")
    # Made data is kept between tests and runs: speaking it takes half a minute.
    monkeypatch.setenv("YUNLU_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "yunlu"))
    return home


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What a test draws does not depend on which tests ran before it."""
    random.seed(0)  # Keras takes its seeds from here
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """A fresh run directory with a job for objects: ``make_run(steps=5, batch=8, ...)``."""
    from yunlu.core.rundir import RunDir
    from yunlu.spec.job import Job

    count = 0

    def make(*, trackers: Sequence[str] = (), **train: Any) -> RunDir:
        nonlocal count
        count += 1
        path = tmp_path / f"run-{count}"
        path.mkdir()
        run = RunDir(path)
        job = Job.model_validate(
            {
                "task": "python:objects",
                "model": "net",
                "data": "python:objects",
                "train": train,
                "trackers": list(trackers),
            }
        )
        run.job.write_text(job.model_dump_json())
        return run

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB, soon full."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "yunlu-test", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    # A worker outlives the command that followed it by the moment it needs to exit.
    deadline = time.monotonic() + 60
    while subprocess.run(["umount", str(mount)], check=False).returncode:
        if time.monotonic() > deadline:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)
            pytest.fail("a process still holds the small disk a minute after the test")
        time.sleep(0.1)
