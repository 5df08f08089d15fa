"""Whose files are trusted: our own, those of the system, and those of users that the settings name."""

from __future__ import annotations

import os
import pwd
import stat
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

_ROOT = 0


def name_if_foreign(uid: int) -> str | None:
    """Name of a user whose files are not trusted; None for one whose files are."""
    if uid in {os.geteuid(), _ROOT}:  # root can change our own files, too
        return None
    name = _name(uid)
    return None if {name, str(uid)} & read_settings().trusted_users else name


def require_private(path: Path) -> None:
    """Refuse a file or directory that another user owns, or that others can write."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(
            f"{path} is a symbolic link, so what it says is not followed",
            hint="put the file or directory itself there",
        )
    owner = name_if_foreign(found.st_uid)
    if owner is not None:
        raise StoreError(
            f"{path} belongs to {owner}, so what it says is not followed",
            hint=f"do this as {owner}; if the file is yours: export YUNLU_TRUSTED_USERS={owner}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"others can write {path} (mode {stat.S_IMODE(found.st_mode):o}), "
            "so what it says is not followed",
            hint=f"if its content is yours: chmod go-w {path}",
        )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
