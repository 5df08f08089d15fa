"""Addresses of clusters that the user has named: the only ones that are ever contacted.

A run says with which executor it is, but runs are files, and may come from somebody else: connecting to
an address that stands there would be to trust whoever wrote it. So an address counts only if it is in
the user's settings: ``YUNLU_EXECUTORS``, or the list of addresses that the user has started something on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.private_files import make_directory, open_private
from yunlu.core.regular_files import open_to_read
from yunlu.core.settings import read_settings
from yunlu.core.users import require_private
from yunlu.executors.executor import ExecutorError

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = "local"
_FILE = "executors"


def scheme_of(address: str) -> str:
    """The name of the executor in an address."""
    return address.partition("?")[0].partition(":")[0]


def is_known(address: str) -> bool:
    """Whether the user has named this very address; processes of this machine need no address."""
    return scheme_of(address) == LOCAL or address in _known_addresses()


def require_known(address: str, *, named_by: str) -> None:
    """Refuse an address that only a file names.

    Args:
        address: Of an executor.
        named_by: The run or pool whose file names it.
    """
    if not is_known(address):
        raise ExecutorError(
            f"{named_by} names the executor {address}, which is not one of yours: "
            "it was not contacted",
            hint=f"if it is yours: export YUNLU_EXECUTORS={address!r}",
        )


def remember_address(address: str) -> None:
    """Add an address that the user has given to the list; without a place for it, it is not kept."""
    if is_known(address) or not address.isprintable() or address != address.strip():
        return
    with suppress(OSError, StoreError):
        make_directory(_file().parent)
        with open_private(_file(), "a", encoding="utf-8") as file:
            file.write(f"{address}\n")


def _known_addresses() -> frozenset[str]:
    known = read_settings().executors
    try:
        with open_to_read(_file()) as file:
            require_private(_file())
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return known
    return known | {line.strip() for line in lines if line.strip()}


def _file() -> Path:
    return read_settings().config / _FILE
