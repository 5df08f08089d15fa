"""Public configuration of a job for trackers: plain values without secrets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from yunlu.training.environment import hide_credentials

if TYPE_CHECKING:
    from yunlu.spec.job import Job

_SECRET_NAME = re.compile(
    r"secret|password|passwd|token(?!i)|credential|api_?key|access_?key|^key$", re.IGNORECASE
)


def public_config(job: Job) -> dict[str, Any]:
    """The job as nested plain values, with credentials masked."""
    dumped: dict[str, Any] = job.model_dump(mode="json")
    return {key: _mask(key, value) for key, value in dumped.items()}


def flatten(config: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """``{"train": {"batch": 8}}`` → ``{"train.batch": 8}``; lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, prefix=f"{name}."))
        else:
            flat[name] = value
    return flat


def _mask(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mask(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask(name, item) for item in value]
    if isinstance(value, str):
        return "***" if _SECRET_NAME.search(name) else hide_credentials(value)
    return value
