"""A run store without files: what reads or writes it cannot assume a path."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from yunlu.runs.run_store import Claim, ItemStat, RunStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator


@dataclass
class SharedItems:
    """What two openings of one run share."""

    contents: dict[str, bytes] = field(default_factory=dict)
    stats: dict[str, tuple[int, float]] = field(default_factory=dict)
    claims: dict[Claim, threading.Lock] = field(
        default_factory=lambda: {claim: threading.Lock() for claim in Claim}
    )
    writes: int = 0


class MemoryRunStore(RunStore):
    """``RunStore`` over dictionaries."""

    def __init__(self, run_id: str = "memory-run", items: SharedItems | None = None) -> None:
        self.is_quiet = False
        self._id = run_id
        self.items = items or SharedItems()

    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return f"memory://{self._id}"

    def location(self, name: str) -> str:
        return f"{self.address}/{name}"

    def stat(self, name: str) -> ItemStat | None:
        if name in self.items.contents:
            write, at = self.items.stats[name]
            return ItemStat(size=len(self.items.contents[name]), modified_at=at, version=(write,))
        inside = [self.items.stats[key] for key in self._inside(name)]
        if not inside:
            return None
        write, at = max(inside)
        return ItemStat(size=0, modified_at=at, version=(write,))

    def read(self, name: str, *, offset: int = 0) -> bytes | None:
        content = self.items.contents.get(name)
        return None if content is None else content[offset:]

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        del durable
        self.items.writes += 1
        self.items.contents[name] = content.encode() if isinstance(content, str) else content
        self.items.stats[name] = (self.items.writes, time.time())

    def remove(self, name: str) -> None:
        for key in (name, *self._inside(name)):
            self.items.contents.pop(key, None)

    def names(self, area: str) -> list[str]:
        return sorted({key[len(area) + 1 :].partition("/")[0] for key in self._inside(area)})

    def append(self, log: str, records: Iterable[Any]) -> None:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if lines:
            self.write(log, self.items.contents.get(log, b"") + lines.encode())

    def read_log(self, log: str, *, offset: int = 0) -> Iterator[tuple[Any, int]]:
        content = self.items.contents.get(log, b"")[offset:]
        for line in content.splitlines(keepends=True):
            offset += len(line)
            yield json.loads(line), offset

    @contextmanager
    def claim(
        self, claim: Claim, *, wait: bool, passed_on: str | None = None
    ) -> Generator[_MemoryClaim]:
        del passed_on
        if not self.items.claims[claim].acquire(blocking=wait):
            raise BlockingIOError(claim)
        try:
            yield _MemoryClaim()
        finally:
            self.items.claims[claim].release()

    def is_claimed(self, claim: Claim) -> bool:
        return self.items.claims[claim].locked()

    def _inside(self, area: str) -> list[str]:
        return [key for key in self.items.contents if not area or key.startswith(f"{area}/")]


class _MemoryClaim:
    def pass_on(self) -> str:
        return ""
