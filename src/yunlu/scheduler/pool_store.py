"""Pool store: settings, decisions and the last view of a pool. All but the settings is derived."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from yunlu.core.errors import StoreError
from yunlu.core.files import append_lines, read_lines, write_atomically
from yunlu.core.json_decode import decode_json
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MOST_BYTES = 8 << 20
_TAIL_BYTES = 1 << 20


class PoolSettings(Value):
    """How a pool is to be run; kept, so that the next service runs it alike."""

    executor: str = "local"
    """Its address."""
    policy: str = "yunlu"
    round_s: float = Field(default=30.0, gt=0)
    """How often is decided anew where nothing has happened."""
    look_s: float = Field(default=1.0, gt=0)
    quotas: dict[str, int] = Field(default_factory=dict)
    """Devices of each team."""
    borrow: dict[str, int] = Field(default_factory=dict)
    """How many more each team may hold while nobody else wants them; without a word, any number."""
    weights: dict[str, float] = Field(default_factory=dict)
    """How much of what is left over goes to each team; 1 without a word."""
    grow_after_s: float = Field(default=30.0, ge=0)
    """How long more machines must be wanted before a cluster is asked for them."""
    idle_s: float = Field(default=300.0, ge=0)
    """How long a machine is idle before it is given back."""
    max_nodes: int | None = Field(default=None, ge=0)
    """Machines that the pool may have, those that are always there included."""
    max_dollars_per_hour: float | None = Field(default=None, ge=0)
    queue_s: float = Field(default=600.0, gt=0)
    """A run that waits longer in the queue of its cluster is placed elsewhere."""
    stall_s: float = Field(default=1800.0, gt=0)
    """A run that writes nothing and computes nothing for so long gives its devices back."""
    dollars_per_hour: float | None = None
    """What each machine costs, where nobody says more."""
    prices: dict[str, float] = Field(default_factory=dict)
    """What machines of a kind cost an hour: ``a100``, ``a100-spot``."""
    team_dollars_per_hour: dict[str, float] = Field(default_factory=dict)
    """What machines that are asked for a team may cost an hour."""


class ServiceRecord(Value):
    """The process that runs the pool."""

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
        """How the pool was last brought up; none where it never was."""
        try:
            return PoolSettings.model_validate_json(self.settings.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StoreError(
                f"{self.settings} cannot be read: {error}", hint="yunlu pool up writes a new one"
            ) from error

    def write_settings(self, settings: PoolSettings) -> None:
        """Keep them."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.settings, settings.model_dump_json(indent=2))

    def tell(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add to the decisions; an explanation is not worth a fault."""
        with suppress(OSError):
            if self.decisions.exists() and self.decisions.stat().st_size > _MOST_BYTES:
                self.decisions.replace(self.decisions.with_suffix(".1.jsonl"))
            append_lines(self.decisions, lines)

    def read_decisions(self, run_id: str | None = None) -> Iterator[dict[str, Any]]:
        """The recent ones, oldest first."""
        for path in (self.decisions.with_suffix(".1.jsonl"), self.decisions):
            start = 0
            with suppress(OSError):
                start = max(0, path.stat().st_size - _TAIL_BYTES)
            for line, _ in read_lines(path, offset=start):  # the first may be half a line
                if isinstance(line, dict) and run_id in {None, line.get("run")}:
                    yield line

    def publish(self, view: dict[str, Any]) -> None:
        """What the pool looks like now, for whoever asks."""
        with suppress(OSError):
            self._replace(self.view, json.dumps(view))

    def read_view(self) -> dict[str, Any] | None:
        """What it looked like at the last look; none where there was none."""
        try:
            result = decode_json(self.view.read_bytes())
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def read_teams(self) -> dict[str, float]:
        """Device-seconds that each team has used lately."""
        try:
            result = decode_json(self.teams.read_bytes())
            return {str(team): float(used) for team, used in result.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def write_teams(self, used_device_s: dict[str, float]) -> None:
        """Keep them."""
        with suppress(OSError):
            self._replace(self.teams, json.dumps(used_device_s))

    def _replace(self, path: Path, text: str) -> None:
        """Atomic for readers, and not flushed: it is derived."""
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            aside.write_text(text)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
