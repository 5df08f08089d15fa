"""Pool store: settings, decisions and the last view of a pool. All but the settings is derived."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from yunlu.core.errors import StoreError
from yunlu.core.files import (
    append_lines,
    make_directory,
    open_private,
    read_lines,
    read_regular,
    write_atomically,
)
from yunlu.core.limits import decode_json
from yunlu.core.secrets import mask_value
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MOST_BYTES = 8 << 20
_TAIL_BYTES = 1 << 20


class PoolSettings(Value):
    """Settings of a pool; stored, so that the next service uses the same."""

    executor: str = "local"
    """Address of the executor."""
    policy: str = "yunlu"
    round_s: float = Field(default=30.0, gt=0)
    """Seconds between decisions while nothing changes."""
    look_s: float = Field(default=1.0, gt=0)
    quotas: dict[str, int] = Field(default_factory=dict)
    """Guaranteed devices of each team."""
    borrow: dict[str, int] = Field(default_factory=dict)
    """Devices that each team may borrow while no other team claims them; default: any number."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each team in sharing what is left over; default: 1."""
    grow_after_s: float = Field(default=30.0, ge=0)
    """How long more nodes must be wanted before they are requested from a cluster."""
    idle_s: float = Field(default=300.0, ge=0)
    """How long a node is idle before it is released."""
    max_nodes: int | None = Field(default=None, ge=0)
    """Most nodes of the pool, permanent ones included."""
    max_dollars_per_hour: float | None = Field(default=None, ge=0)
    queue_s: float = Field(default=600.0, gt=0)
    """A run that waits longer in its cluster's queue is placed elsewhere."""
    stall_s: float = Field(default=1800.0, gt=0)
    """A run without output and CPU time for this long is stopped."""
    dollars_per_hour: float | None = None
    """Price of a node per hour, unless ``prices`` has one for its kind."""
    prices: dict[str, float] = Field(default_factory=dict)
    """Price per hour by kind of node: ``a100``, ``a100-spot``."""
    team_dollars_per_hour: dict[str, float] = Field(default_factory=dict)
    """Most dollars per hour for nodes requested for a team."""


class ServiceRecord(Value):
    """Process of the scheduler service."""

    pid: int
    process_started_at: float
    host: str
    began_at: float


class PoolStore:
    """Files of the pool of one home."""

    def __init__(self, home: Path) -> None:
        self.path = home / ".pool"
        self.settings = self.path / "settings.json"
        self.service = self.path / "service.json"
        self.lock = self.path / "service.lock"
        self.log = self.path / "service.log"
        self.decisions = self.path / "decisions.jsonl"
        self.view = self.path / "view.json"
        self.teams = self.path / "teams.json"

    def read_settings(self) -> PoolSettings | None:
        """Settings of the last start; None if the pool was never up."""
        try:
            return PoolSettings.model_validate_json(self._read(self.settings))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError as error:
            raise StoreError(
                f"{self.settings} cannot be read: {error}", hint="yunlu pool up writes a new one"
            ) from error

    def write_settings(self, settings: PoolSettings) -> None:
        """Store them."""
        make_directory(self.path)
        write_atomically(self.settings, settings.model_dump_json(indent=2))

    def append_decisions(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append decisions; errors are ignored, since explanations are not essential."""
        with suppress(OSError):
            if self.decisions.exists() and self.decisions.stat().st_size > _MOST_BYTES:
                self.decisions.replace(self.decisions.with_suffix(".1.jsonl"))
            append_lines(self.decisions, mask_value(list(lines)))

    def read_decisions(self, run_id: str | None = None) -> Iterator[dict[str, Any]]:
        """Recent decisions, oldest first."""
        for path in (self.decisions.with_suffix(".1.jsonl"), self.decisions):
            start = 0
            with suppress(OSError):
                start = max(0, path.stat().st_size - _TAIL_BYTES)
            # The first may be a partial line.
            for line, _ in read_lines(path, offset=start, below=self.path.parent):
                if isinstance(line, dict) and run_id in {None, line.get("run")}:
                    yield line

    def publish(self, view: dict[str, Any]) -> None:
        """Publish the current view of the pool."""
        with suppress(OSError):
            self._replace(self.view, json.dumps(view))

    def read_view(self) -> dict[str, Any] | None:
        """The last published view; None if there is none."""
        try:
            result = decode_json(self._read(self.view))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def read_teams(self) -> dict[str, float]:
        """Recent device-seconds of each team."""
        try:
            result = decode_json(self._read(self.teams))
            return {str(team): float(used) for team, used in result.items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return {}

    def write_teams(self, used_device_s: dict[str, float]) -> None:
        """Store them."""
        with suppress(OSError):
            self._replace(self.teams, json.dumps(used_device_s))

    def read_service(self) -> ServiceRecord:
        """The process that runs the pool, or ran it last."""
        return ServiceRecord.model_validate_json(self._read(self.service))

    def _read(self, path: Path) -> bytes:
        return read_regular(path, below=self.path.parent)

    def _replace(self, path: Path, text: str) -> None:
        """Atomic for readers, but not flushed to disk: it is derived."""
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            aside.unlink(missing_ok=True)
            with open_private(aside, "x", below=self.path.parent) as file:
                file.write(text)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
