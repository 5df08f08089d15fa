"""Public configuration of a job for trackers: plain values without secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.core.secrets import mask_value

if TYPE_CHECKING:
    from yunlu.spec.job import Job


def public_config(job: Job) -> dict[str, Any]:
    """The job as nested plain values, with credentials masked."""
    return mask_value(job.model_dump(mode="json"))


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
