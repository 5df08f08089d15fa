"""Worker group of a run: the record of its supervisor, requests to it, and the secret its workers share.

Secret that externally launched workers prove to each other: from the environment, or from the home.
torchrun, srun and mpirun start workers without one. Whoever can read the home may read the runs anyway.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.errors import StoreError
from yunlu.core.files import check_home, make_directory, open_to_read
from yunlu.core.framing import FrameError, FrameReader, receive_frame, send_frame
from yunlu.core.secure_link import LinkRefusedError, connect_link, derive_secret
from yunlu.core.settings import launch_secret
from yunlu.core.value import Value
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore

FILE = ".secret"
_SECRET_BYTES = 32


def read_group_secret(home: Path) -> bytes:
    """The secret of all launches of this home; made at the first call."""
    given = launch_secret()
    if given is not None:
        return given.encode()
    make_directory(check_home(home))
    path = home / FILE
    if not path.exists():
        _create(path)
    return _read(path)


def _create(path: Path) -> None:
    """Create the file whole; of several processes that try, one succeeds."""
    descriptor, aside = tempfile.mkstemp(prefix=".secret.", dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES))
        try:
            os.link(aside, path)
        except FileExistsError:
            return
    finally:
        Path(aside).unlink()


def _read(path: Path) -> bytes:
    with open_to_read(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StoreError(
                f"{path} belongs to another user, or others can read it",
                hint=f"remove it and run `chmod 700 {path.parent}`; the next launch makes another",
            )
        return file.read()


LOCAL = "local"
"""Name of the node that the supervisor starts itself."""


class GroupWorker(Value):
    """One worker of the group, identified by pid and start time."""

    number: int
    """Unique in this run: never given again."""
    node: str
    host: str
    pid: int
    process_started_at: float
    rank: int | None = None
    """None for a spare."""


class WorkerGroup(Value):
    """Record of the supervisor: what its successor needs, and whoever sends it a request."""

    host: str
    port: int
    token: str
    pid: int
    """Process of the supervisor."""
    process_started_at: float
    node_module: str
    """Module of the node agent: it loads the data once and forks workers."""
    generation: int = 0
    target: int
    """Target number of workers."""
    wanted: dict[str, int] = Field(default_factory=dict)
    """Target number of workers per node."""
    spares: int = 1
    next_worker: int = 0
    """Number of the next worker."""
    layouts: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """Parallel layout by number of workers."""
    history: dict[int, dict[str, Any]] = Field(default_factory=dict)
    """Parallel layout by generation."""
    workers: tuple[GroupWorker, ...] = ()


def read_worker_group(run: RunStore) -> WorkerGroup | None:
    """The record; None where the run has no worker group."""
    try:
        content = run.read(Document.WORKER_GROUP)
        return None if content is None else WorkerGroup.model_validate_json(content)
    except (OSError, ValueError):
        return None


def count_workers(group: WorkerGroup) -> int:
    """Number of workers that train; of asynchronous ones, which have no ranks, the target."""
    if group.workers or not group.generation:
        return sum(worker.rank is not None for worker in group.workers)
    return group.target


def write_worker_group(run: RunStore, group: WorkerGroup) -> None:
    """Store the record, readable by its owner alone: it holds the token.

    Not flushed to disk: it must survive a process, and no process survives a power cut.
    """
    run.write(Document.WORKER_GROUP, group.model_dump_json(), durable=False)


def control_secret(token: str) -> bytes:
    """Secret of the control connections: both ends prove it, nobody sends it."""
    return derive_secret(token.encode(errors="surrogatepass"), "control")


def send_request(
    group: WorkerGroup, request: dict[str, Any], *, timeout_s: float = 10
) -> dict[str, Any]:
    """Send one request to the supervisor and return its answer."""
    where = f"the supervisor at {group.host}:{group.port}"
    try:
        with connect_link(
            (group.host, group.port), control_secret(group.token), timeout_s=timeout_s
        ) as connection:
            send_frame(connection, {"kind": "hello_client"})
            send_frame(connection, request)
            return receive_frame(connection, FrameReader()).control
    except LinkRefusedError as error:
        raise StoreError(
            f"{where} has another token, or is no supervisor: {error}",
            hint=f"the {Document.WORKER_GROUP} of the run holds the right token",
        ) from error
    except (OSError, EOFError, FrameError) as error:
        cause = str(error) or "it closed the connection"
        raise StoreError(
            f"{where} does not answer: {cause}",
            hint="it may just be restarting; try again in a few seconds",
        ) from error
