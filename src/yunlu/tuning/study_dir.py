"""The directory of a study.

``study.json`` is the request; ``study.sqlite3`` holds the trials (see ``records``); ``state.json`` is the
status; the process that runs the study holds ``runner.lock``; a file ``stop`` asks it to end.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from yunlu.core.errors import StoreError, YunluError, did_you_mean
from yunlu.core.files import name_if_foreign, open_descriptor, read_regular, write_atomically
from yunlu.core.limits import decode_json
from yunlu.core.value import Value
from yunlu.planning.plan import Plan
from yunlu.runs.home import private_home
from yunlu.spec.job import Job
from yunlu.tuning.values import Dimension

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

FOLDER = "studies"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


class StudyError(YunluError):
    """A study cannot start or continue: nothing to search, no metric reported, every trial fails."""

    code = "study"


class StudyRequest(Value):
    """Request of a study: ``study.json``."""

    id: str
    """Distinguishes it from another study of the same name."""
    name: str
    job: Job | None = None
    """Job of the trials; None where an external program calls ask and tell."""
    source: str | None = None
    """The job's file, as named by the user."""
    overrides: tuple[str, ...] = ()
    """Overrides of the job, as typed: ``train.epochs=3``."""
    target: Job | None = None
    """Where ``job`` is a narrow proxy: the original job."""
    metrics: tuple[str, ...]
    directions: tuple[Literal["minimize", "maximize"], ...]
    rungs: int = 0
    """Evaluations of a whole training; 0: not known yet."""
    plan: Plan | None = None
    """Of the job itself, where a worker made one."""
    fields: tuple[dict[str, Any], ...] = ()
    """The dimensions, as ``dump_dimension`` writes them."""
    method: str = ""
    stop_rule: str = ""
    seed: int = 0
    trials: int | None = None
    dollars: float | None = None
    deadline_s: float | None = None
    """Wall time; pauses of a stopped study do not count."""
    parallel: int | None = None
    devices: int | None = None
    dollars_per_hour: float | None = None
    """Of all its devices together."""
    forecast: dict[str, Any] | None = None
    created_at: float

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What is varied."""
        return tuple(_read_dimension(field) for field in self.fields)


def dump_dimension(dimension: Dimension) -> dict[str, Any]:
    """A dimension as JSON."""
    return asdict(dimension)


def _read_dimension(field: dict[str, Any]) -> Dimension:
    likely = field.get("likely")
    fields: dict[str, Any] = field | {
        "choices": tuple(field.get("choices", ())),
        "when": {name: tuple(values) for name, values in field.get("when", {}).items()},
        "likely": None if likely is None else tuple(likely),
    }
    return Dimension(**fields)


class StudyStatus(Value):
    """Status of a study: ``state.json``."""

    state: Literal["running", "finished", "stopped", "failed"] = "stopped"
    reason: str = ""
    began_at: float | None = None
    ended_at: float | None = None
    devices: int = 0
    clock_at: float | None = None
    """Start of the deadline."""
    idle_s: float = 0.0
    """Time since its start in which no process ran it."""

    def idle_until(self, now: float) -> float:
        """``idle_s`` if it continues now; the end of a killed runner is unknown and adds nothing."""
        return self.idle_s + (0.0 if self.ended_at is None else max(now - self.ended_at, 0.0))


class StudyDir:
    """Paths inside a study's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / "study.json"
        self.status = path / "state.json"
        self.database = path / "study.sqlite3"
        self.lock = path / "runner.lock"
        self.stop = path / "stop"

    @property
    def name(self) -> str:
        """The study's name is that of its directory."""
        return self.path.name

    @property
    def storage(self) -> str:
        """Optuna's URL of the trials."""
        return f"sqlite:///{self.database}"

    def read_request(self) -> StudyRequest:
        """The request."""
        try:
            return StudyRequest.model_validate_json(self._read(self.request))
        except ValidationError as error:
            raise self.damaged(self.request) from error

    def require_own(self) -> None:
        """Refuse to act on the study of another user: its trials would run in our own name."""
        owner = name_if_foreign(self.path.stat().st_uid)
        if owner is not None:
            raise StudyError(
                f"the study {self.name} in {self.path} belongs to {owner}: it can be read, not run",
                hint=f"do this as {owner}; if it is yours: export YUNLU_TRUSTED_USERS={owner}",
            )

    def _read(self, file: Path) -> bytes:
        return read_regular(file, below=self.path.parent)

    def damaged(self, file: Path) -> StudyError:
        """The error for a file that cannot be read."""
        return StudyError(
            f"the study {self.name} is damaged: {file} cannot be read",
            hint=f"bring the file back, or move the directory {self.path} away",
        )

    def write_request(self, request: StudyRequest) -> None:
        """Write the request."""
        # What was not set stays unset: a search is read again as it was written.
        write_atomically(self.request, request.model_dump_json(indent=2, exclude_unset=True))

    def read_status(self) -> StudyStatus:
        """The status; ``stopped`` where the runner has vanished."""
        try:
            status = StudyStatus.model_validate_json(self._read(self.status))
        except FileNotFoundError:
            return StudyStatus()
        except ValidationError as error:
            raise self.damaged(self.status) from error
        if status.state == "running" and not self.is_running():
            return status.model_copy(
                update={"state": "stopped", "reason": "the process that ran it has ended"}
            )
        return status

    def write_status(self, status: StudyStatus) -> None:
        """Write the status."""
        write_atomically(self.status, status.model_dump_json())

    def is_running(self) -> bool:
        """Whether a process runs it now."""
        try:
            with _locked(self.lock, create=False):
                return False
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False

    @contextmanager
    def locked_by_runner(self) -> Generator[None]:
        """Hold the runner's lock; it is released with the process, however that ends."""
        self.require_own()
        try:
            with _locked(self.lock, create=True):
                self.stop.unlink(missing_ok=True)
                yield
        except BlockingIOError as error:
            raise StudyError(
                f"the study {self.name} is being run by another process",
                hint=f"yunlu study show {self.name} watches it, yunlu study stop {self.name} ends it",
            ) from error

    def request_stop(self) -> None:
        """Ask the runner to hold the trials and end."""
        self.require_own()
        write_atomically(self.stop, "")


def studies_home() -> Path:
    """Where studies live: beside the runs."""
    return private_home() / FOLDER


def check_name(name: str) -> str:
    """Check a name; it is used for a directory and the runs of the trials."""
    if not _NAME.fullmatch(name):
        raise StudyError(
            f"{name!r} cannot name a study",
            hint="up to 32 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )
    return name


def list_studies() -> list[str]:
    """Names of all studies, newest first."""
    dated = [(_created_at(path), path.parent) for path in studies_home().glob("*/study.json")]
    return [path.name for _, path in sorted(dated, reverse=True)]


def _created_at(request: Path) -> float:
    try:
        return float(decode_json(read_regular(request))["created_at"])
    except (ValueError, KeyError, TypeError, OSError, StoreError):
        return 0.0  # damaged: it says so when it is opened


def find_study(name: str) -> StudyDir:
    """The directory of a study; ``last`` is the newest."""
    known = list_studies()
    if not known:
        raise StudyError(f"there are no studies in {studies_home()}", hint="yunlu tune JOB")
    if name == "last":
        name = known[0]
    if name not in known:
        raise StudyError(f"there is no study {name!r}", hint=did_you_mean(name, known))
    return StudyDir(studies_home() / name)


@contextmanager
def _locked(path: Path, *, create: bool) -> Generator[None]:
    descriptor = open_descriptor(path, os.O_RDWR | (os.O_CREAT if create else 0))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
