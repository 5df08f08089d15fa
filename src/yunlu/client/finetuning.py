"""The job that fine-tuning a trained model amounts to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError
from yunlu.jobs.base_model import find_base_model
from yunlu.jobs.job_input import merge, plain, read_options
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.jobs.base_model import StartingModel
    from yunlu.spec.job import Job


def finetuning_job(
    start: str | Path,
    job: str | Path | Job | None = None,
    overrides: Sequence[str] = (),
    train_options: Mapping[str, Any] = {},
    *,
    adapter: Any = None,
    **parts: Any,
) -> Job:
    """The whole job: its model, tokenizer and labels are those of the trained model."""
    base = find_base_model(start)
    options = read_options(train_options)
    if isinstance(job, str | Path):
        job = _load_without_model(job, base, overrides)
    elif overrides:
        raise JobError("overrides go with a job file; say the values as arguments instead")
    mapping = {} if job is None else job.model_dump(mode="json", exclude_unset=True)
    mapping |= {key: plain(value) for key, value in parts.items() if value is not None}
    if base.task is not None:
        mapping.setdefault("task", base.task)
    model = mapping.get("model", {})
    mapping["model"] = base.choose_model(
        model if adapter is None else {**model, "adapter": plain(adapter)}
    )
    if options:
        mapping["train"] = merge(mapping.get("train") or {}, options)
    return base.complete(job_from_mapping(mapping, where="finetune()" if job is None else "job"))


def _load_without_model(job: str | Path, base: StartingModel, overrides: Sequence[str]) -> Job:
    """The job of a file that may leave out its model."""
    try:
        return load_job(job, overrides=overrides)
    except InvalidJobError:  # if only the name was missing, this adds it; else it fails again
        name = f"model.name={json.dumps(base.model.name)}"
        return load_job(job, overrides=(name, *overrides))
