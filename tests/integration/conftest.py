"""Running the real command, as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines it printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    def scores(self, split: str) -> dict[str, float]:
        """The last evaluation of a split."""
        found = [r for r in self.records if r.get("event") == "evaluation" and r["split"] == split]
        return {"loss": found[-1]["loss"], **found[-1]["metrics"]}


Yunlu = Callable[..., Answer]


@pytest.fixture
def environment(own_home: Path) -> dict[str, str]:
    return os.environ | {"YUNLU_HOME": str(own_home), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def yunlu(environment: dict[str, str], tmp_path: Path) -> Yunlu:
    def call(*arguments: str | Path, cwd: Path = tmp_path) -> Answer:
        command: Sequence[str] = [sys.executable, "-m", "yunlu.cli.main", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=cwd, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return call
