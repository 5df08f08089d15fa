"""Processes of one trial: found again by a mark in their environment, whoever forked them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
MARK, NODE_MARK = "YUNLU_BENCH_TRIAL", "YUNLU_BENCH_NODE"
_GONE_S = 10.0


@dataclass(slots=True)
class Processes:
    """All that one trial starts, and what those start."""

    log: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def start(self, command: Sequence[str], *, node: int = 0, **environment: str) -> None:
        """Start a program, in a session of its own, as a part of one node."""
        marks = {MARK: self.mark, NODE_MARK: f"{self.mark}.{node}"}
        with self.log.open("ab") as log:
            child = subprocess.Popen(  # noqa: S603 (our own scripts)
                list(command),
                cwd=ROOT,
                env={**os.environ, **self.environment, **environment, **marks},  # noqa: TID251 (a script, not the package)
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(child)

    def alive(self) -> list[int]:
        """Everybody."""
        return find_marked(f"{MARK}={self.mark}")

    def on_node(self, node: int) -> list[int]:
        """Whatever runs on one node, even where its parent is gone."""
        return find_marked(f"{NODE_MARK}={self.mark}.{node}")

    def is_over(self) -> bool:
        """Whether all that was started here has ended."""
        return all(child.poll() is not None for child in self._started)

    def kill(self, pids: Sequence[int]) -> None:
        """At once, and whether stopped or not."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill all, and see them gone."""
        until = time.monotonic() + _GONE_S
        while (left := self.alive()) and time.monotonic() < until:
            self.kill(left)
            time.sleep(0.02)
        for child in self._started:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_GONE_S)


def find_marked(mark: str) -> list[int]:
    """Living processes with this in the environment they were started with."""
    wanted = mark.encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"
