"""What a worker group tells about itself: one JSON line per worker that starts and per completed step."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A completed step."""

    step: int
    """Counted from 0."""
    at: float
    group: str
    """Changes whenever the set of workers does."""
    size: int
    """Workers that took part."""
    samples: tuple[int, ...] = ()
    """Those the writer answers for: its own, or everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that has started."""

    rank: int
    pid: int
    at: float


@dataclass(slots=True)
class Journal:
    """Follows files to which workers append. Half a line, of a writer who was killed, is no record."""

    paths: list[Path]
    steps: list[Step] = field(default_factory=list[Step])
    workers: list[Worker] = field(default_factory=list[Worker])
    _read: dict[Path, int] = field(default_factory=dict["Path", int])

    def refresh(self) -> None:
        """Read what was added since."""
        for path in self.paths:
            for record in self._new_records(path):
                if "step" in record:
                    record["samples"] = tuple(record["samples"])
                    self.steps.append(Step(**record))
                else:
                    self.workers.append(Worker(**record))
        self.steps.sort(key=lambda step: step.at)

    def _new_records(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + whole
        return [record for line in text[:whole].splitlines() if (record := _parse(line))]


class Pen:
    """Appends records, each by one write: whoever is killed leaves no torn line before another's."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def start(self, rank: int) -> None:
        """A worker is there."""
        self._write({"rank": rank, "pid": os.getpid()})

    def complete(self, step: int, *, group: str, size: int, samples: list[int]) -> None:
        """A step is done, and its update applied."""
        self._write({"step": step, "group": group, "size": size, "samples": samples})

    def _write(self, record: dict[str, Any]) -> None:
        record["at"] = time.time()
        os.write(self._file, (json.dumps(record) + "\n").encode())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
