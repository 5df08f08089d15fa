"""Shared by all tests: every run and every made data set goes to a place of the test's own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.rewritten_assertions import rewrite_once
from tests.waiting import wait_until
from yunlu.runs.run_store import Document

# No test asserts on time. `make test` draws the same examples each time; `make fuzz` draws others.
settings.register_profile("yunlu", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    max_examples=300,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("yunlu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``make screens``."""
    parser.addoption(
        "--write-screens", action="store_true", help="store what commands show anew (tests/screens)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw examples that depend on nothing but the test; start programs that Ctrl-C ends."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--hypothesis-profile") != "fuzz":
        # Hypothesis draws constants of the modules that happen to be imported: other tests decide.
        providers._get_local_constants = lambda: providers._local_constants
    rewrite_once(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle what is fuzzed: the time is often over before all tests had their turn."""
    if config.getoption("--hypothesis-profile") == "fuzz":
        random.Random(config.getoption("--hypothesis-seed")).shuffle(items)


@pytest.fixture(scope="session")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What no test should pay for: a probe of this processor, canned, and the speeds of precisions."""
    from tests.canned_profiles import store_profiles
    from yunlu.training.probe import cpu_name

    place = tmp_path_factory.mktemp("measured-once")
    (place / "precisions").mkdir()
    accelerator = os.environ.get("YUNLU_TEST_DEVICE")  # tests/training_device.py
    pretend = {accelerator: f"Pretend {accelerator} 0"} if accelerator else {}
    store_profiles(place, cpu=cpu_name(), **pretend)
    return place


@pytest.fixture(autouse=True)
def own_home(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    measured_once: Path,
) -> Path:
    home, cache = tmp_path / "home", tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("YUNLU_HOME", str(home))
    monkeypatch.setenv("YUNLU_LANG", "en")
    monkeypatch.delenv("COLUMNS", raising=False)  # output is as wide as this says
    monkeypatch.setenv("YUNLU_CACHE", str(cache))
    monkeypatch.setenv("YUNLU_CONFIG", str(tmp_path / "config"))
    # Synthetic data are kept between tests and runs: speaking it takes half a minute. Lessons are not.
    synthetic = Path(__file__).parents[1] / ".pytest_cache" / "yunlu" / "synthetic"
    synthetic.mkdir(parents=True, exist_ok=True)
    (cache / "synthetic").symlink_to(synthetic)
    (cache / "precisions").symlink_to(measured_once / "precisions")
    (cache / "probe").mkdir()
    for file in (measured_once / "probe").iterdir():
        (cache / "probe" / file.name).symlink_to(file)  # storing another replaces the link
    return home


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes get five times as long: on a loaded machine a healthy one may be late."""
    if "unit" not in request.path.parts:
        monkeypatch.setenv("YUNLU_PATIENCE", "5")


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
    from yunlu.runs.home import open_run
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

    count = 0

    def make(*, trackers: Sequence[str] = (), **train: Any) -> RunStore:
        nonlocal count
        count += 1
        path = tmp_path / f"run-{count}"
        path.mkdir()
        run = open_run(path)
        job = Job.model_validate(
            {
                "task": "python:objects",
                "model": "net",
                "data": "python:objects",
                "train": train,
                "trackers": list(trackers),
            }
        )
        (run.path / Document.JOB).write_text(job.model_dump_json())
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
    try:
        wait_until(
            lambda: subprocess.run(["umount", str(mount)], check=False).returncode == 0,
            "nobody holds the small disk any more",
            pause_s=0.1,
        )
    except AssertionError:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
        raise
