"""Base model of a fine-tuning job: an earlier run, an exported model, or a Hugging Face directory.

Its files complete the job: the model, and how its data was preprocessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, ModelError, StoreError
from yunlu.core.json_decode import read_json
from yunlu.jobs import lifecycle
from yunlu.runs.home import open_if_run
from yunlu.runs.run_store import Area, Log, require_local
from yunlu.spec.job import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

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
