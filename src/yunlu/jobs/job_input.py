"""Job input: a file, a value or keyword arguments, with overrides and options; or a model to fine-tune.

The base model of a fine-tuning job is an earlier run, an exported model, or a Hugging Face directory. Its files
complete the job: the model, and how its data was prepared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from yunlu.core.errors import JobError, ModelError, StoreError, did_you_mean
from yunlu.core.limits import read_json
from yunlu.core.value import Value
from yunlu.jobs import lifecycle
from yunlu.runs.home import open_if_run
from yunlu.runs.run_store import Area, Log, require_local
from yunlu.spec.counterparts.table import answer_key
from yunlu.spec.job import ModelSpec
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job
from yunlu.spec.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.runs.run_store import RunStore
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
            answer = answer_key(name, options[name], options)
            hint = answer or did_you_mean(name, known)
            raise JobError(f"train() has no option {name!r}", hint=hint)
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


_HF = "hf:"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingModel:
    """A trained model to fine-tune."""

    source: str
    """Its directory, or its name on the hub."""
    model: ModelSpec
    """Architecture to build, and where its weights are."""
    task: str | None = None
    """Task it was trained for; None where unknown."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of a job's ``data`` part that its weights depend on."""

    @property
    def is_hf(self) -> bool:
        """Whether transformers loads it and can replace its head for another task."""
        return self.model.name.startswith(_HF)

    def choose_model(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Model of the job: that of the base model with the job's additions (an adapter, a dropout)."""
        own = self.model.model_dump(mode="json")
        for key in ("name", "weights"):
            if section.get(key) not in {None, own[key]}:
                raise JobError(
                    f"model.{key}: the job says {section[key]!r}, but fine-tuning starts from "
                    f"{own[key] or own['name']!r}.",
                    hint="leave model out of the job, or keep only model.adapter",
                )
        if section.get("pretrained") is False:
            raise JobError(
                "model.pretrained: false would forget the weights that fine-tuning starts from.",
                hint="remove it, or train from scratch with: yunlu train",
            )
        return {**own, **section, "name": own["name"], "weights": own["weights"],
                "args": {**own["args"], **section.get("args", {})}}  # fmt: skip

    def complete(self, job: Job) -> Job:
        """The job; what its ``data`` leaves open is as for the base model."""
        if self.task is not None and self.task != job.task and not self.is_hf:
            raise JobError(
                f"task: {self.source} was trained for {self.task}, not for {job.task}.",
                hint=f"fine-tune it for {self.task}, or start from a model for {job.task}",
            )
        given = job.data.model_fields_set
        inherited = {key: value for key, value in self.data.items() if key not in given}
        return job.model_copy(update={"data": job.data.model_copy(update=inherited)})


def find_base_model(text: str | Path) -> StartingModel:
    """Find a base model: a run by its id or a unique prefix, a directory, or ``hf:NAME``."""
    name = str(text)
    is_local = Path(name.removeprefix(_HF)).expanduser().is_dir()
    if name.startswith(_HF) and not is_local:  # on the hub: checked when it is loaded
        return StartingModel(source=name, model=ModelSpec(name=name))
    return _from_directory(find_model_directory(name.removeprefix(_HF), or_else="hf:NAME"))


def find_model_directory(text: str | Path, *, or_else: str = "") -> Path:
    """Directory of an exported model: of a run by id, unique prefix or path, or as it is named."""
    path = Path(text).expanduser()
    if path.is_dir():
        run = open_if_run(path.absolute())
        # An exported model holds a copy of the job, but no events.
        return _exported_by(run) if run is not None and run.has(Log.EVENTS) else path.absolute()
    others = f", or {or_else}" if or_else else ""
    if "/" in str(text):
        raise ModelError(
            f"There is no directory {path.absolute()}.",
            hint=f"name a run, a model directory{others}",
        )
    try:
        return _exported_by(lifecycle.find(str(text)))
    except StoreError as error:
        hint = f"{error.hint}; or name a directory{others}" if error.hint else None
        raise StoreError(error.message, hint=hint) from error


def _exported_by(run: RunStore) -> Path:
    if not run.has(Area.MODEL):
        state = lifecycle.read_record(run).state
        raise StoreError(
            f"{run.id} has no exported model: it is {state}.",
            hint=f"yunlu resume {run.id} brings it to its end" if not state.is_active else
            f"wait for its end: yunlu logs -f {run.id}",
        )  # fmt: skip
    return require_local(run).directory(Area.MODEL)


def _from_directory(directory: Path) -> StartingModel:
    config = _read(directory / "config.json")
    if config is None:
        raise ModelError(
            f"{directory} is no model to start from: it has no config.json.",
            hint="name a run, the model directory of one, or a Hugging Face directory",
        )
    job = _read(directory / "job.json") or {}
    task = job.get("task")
    if task == lifecycle.IN_PROCESS:
        raise ModelError(
            f"{directory} was trained from live Python objects, which a job file cannot refer to.",
            hint="load its model.safetensors into your module, and call yunlu.train(model=...)",
        )
    parts = _read(directory / "preprocessing.json") or _read(directory / "tabular.json") or {}
    own = config.get("model")
    if not isinstance(own, dict) or "class" not in config:
        data = {key: parts[key] for key in ("sample_rate",) if key in parts}
        name = f"{_HF}{directory}"
        return StartingModel(
            source=str(directory), model=ModelSpec(name=name), task=task, data=data
        )
    model = ModelSpec(name=own["name"], args=own.get("args", {}), weights=str(directory))
    return StartingModel(source=str(directory), model=model, task=task, data=_data_options(parts))


def _data_options(parts: dict[str, Any]) -> dict[str, Any]:
    """Preprocessing of the base model, as keys of a job's ``data``."""
    data = {key: parts[key] for key in ("max_length", "sample_rate", "target") if key in parts}
    if "height" in parts and parts["height"] == parts.get("width"):
        data["image_size"] = parts["height"]
    if isinstance(features := parts.get("features"), dict):
        known = [*features.get("numeric", []), *features.get("categories", [])]
        data["input"] = [feature["name"] for feature in known]
    return data


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold an object.")
    return content


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
