"""Cache of tuned settings by model shape.

Settings change the rounding of sums, so settings once chosen for a job on a machine stay: the same job
and seed then give the same losses. Of two runs that measure at the same time, the first to write wins.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import ValidationError

from yunlu.core.private_files import make_directory, open_private
from yunlu.core.settings import read_settings
from yunlu.training.autotune.search import TunedSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load_cached(shape: Sequence[Any]) -> TunedSettings | None:
    """Tuned settings of an earlier run of the same shape; None if not cached."""
    try:
        tuned = TunedSettings.model_validate_json(_path(shape).read_bytes())
    except (OSError, ValidationError):
        return None
    trials = tuple(trial.model_copy(update={"remembered": True}) for trial in tuned.trials)
    return tuned.model_copy(update={"trials": trials})


def save_cached(shape: Sequence[Any], tuned: TunedSettings) -> TunedSettings:
    """Store tuned settings; returns the stored entry: an earlier one stays."""
    path = _path(shape)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_directory(path.parent)
        with open_private(aside, "w") as file:
            file.write(tuned.model_dump_json())
        os.link(aside, path)  # fails where there is one already
    except FileExistsError:
        return load_cached(shape) or tuned
    except OSError:
        return tuned  # without a cache the next run measures again
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return tuned


def _path(shape: Sequence[Any]) -> Path:
    text = json.dumps(list(shape), sort_keys=True, default=str)
    return read_settings().cache / "settings" / f"{xxhash.xxh3_64_hexdigest(text.encode())}.json"
