"""Secret that externally launched workers prove to each other: from the environment, or from the home.

torchrun, srun and mpirun start workers without one. Whoever can read the home may read the runs anyway.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from yunlu.core.errors import StoreError
from yunlu.core.private_files import check_home, make_directory
from yunlu.core.regular_files import open_to_read
from yunlu.core.settings import launch_secret

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
