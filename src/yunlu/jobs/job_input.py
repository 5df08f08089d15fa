"""Job input: a file, a value or keyword arguments, with overrides and options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from yunlu.core.errors import JobError, did_you_mean
from yunlu.core.value import Value
from yunlu.spec.load import job_from_mapping, load_job
from yunlu.spec.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.spec.job import Job


def build_job(
    job: str | Path | Job | None,
    overrides: Sequence[str],
    train_options: Mapping[str, Any],
    **parts: Any,
) -> Job:
    """Build a job from a file or value, overrides of single keys, and keyword arguments."""
    options = read_options(train_options)
    sections = {key: plain(value) for key, value in parts.items() if value is not None}
    if isinstance(job, str | Path):
        loaded = load_job(job, overrides=overrides)
        if not sections and not options:
            return loaded
        mapping = loaded.model_dump(mode="json", exclude_unset=True)
    elif not hasattr(job, "model_dump") and job is not None:
        raise JobError(f"{job!r} is no job", hint="pass the path of a job file, or a yunlu.Job")
    else:
        mapping = {} if job is None else job.model_dump(mode="json", exclude_unset=True)
        if overrides:
            raise JobError("overrides need a job file; pass the values as arguments instead")
    mapping |= sections
    if options:
        mapping["train"] = merge(mapping.get("train") or {}, options)
    return job_from_mapping(mapping, where="train()" if job is None else "job")


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the job's ``train`` part; ``lr`` is the optimiser's."""
    known = {*TrainSpec.model_fields, "lr"}
    for name in options:
        if name not in known:
            raise JobError(f"train() has no option {name!r}", hint=did_you_mean(name, known))
    chosen = {key: plain(value) for key, value in options.items()}
    if "lr" in chosen:
        chosen["optimizer"] = merge(_as_section(chosen.get("optimizer")), {"lr": chosen.pop("lr")})
    return chosen


def merge(mapping: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Mapping with the options merged in, section by section."""
    merged = dict(mapping)
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in options and other not in options:  # the length given last wins
            merged.pop(other, None)
    for key, value in options.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(cast("Any", before), cast("Any", value)) if both else value
    return merged


def _as_section(optimizer: Any) -> dict[str, Any]:
    return {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer or {})


def plain(value: Any) -> Any:
    """Value in the form of a job file."""
    if isinstance(value, Value):
        return value.model_dump(mode="json", exclude_unset=True)
    return str(value) if isinstance(value, Path) else value
