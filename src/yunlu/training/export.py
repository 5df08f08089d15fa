"""Export of a model: full-precision weights as safetensors, the task's artifacts, a model card.

``load_model`` reads what ``export`` writes, to predict with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from yunlu.core.errors import DataError, ModelError, TrainingError, is_disk_full
from yunlu.core.files import make_directory, restrict_tree, sync_directory, sync_tree
from yunlu.core.imports import names_object
from yunlu.core.limits import read_json
from yunlu.core.secrets import mask
from yunlu.core.units import show_count, show_number
from yunlu.runs.run_store import Area, require_local
from yunlu.spec.job import Job
from yunlu.training.models.adapter import has_adapter, merge_adapter, save_adapter
from yunlu.training.models.hf import is_hf, names_hf
from yunlu.training.models.initial_weights import describe_base, load_exported
from yunlu.training.models.keras import KerasModule
from yunlu.training.quantize import INT8_FILE, convert_int8, load_int8
from yunlu.training.tasks.task import Predicts, SavesArtifacts, open_task
from yunlu.training.tensor_slices import copy_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import ModelSpec
    from yunlu.training.tasks.task import ModelPrediction, Splits, Task


JOB_FILE = "job.json"
"""The job that trained a model, for whoever gets the model without the run."""
KERAS_FILE = "model.keras"
"""A Keras model as Keras reads it: the architecture is in no other file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLineage:
    """Provenance of a model, for its card."""

    splits: Splits
    environment: dict[str, Any]
    step: int
    scores: dict[str, dict[str, float]]
    """Split → metrics."""


def export(
    run: RunStore, job: Job, task: Task, model: nn.Module, lineage: ModelLineage
) -> list[str]:
    """Write ``model/`` aside, then publish it whole; returns the names of its files."""
    published = require_local(run).directory(Area.MODEL)
    aside = published.with_name(".model.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        make_directory(aside)
        if has_adapter(model):
            base = job.model.weights or job.model.name.removeprefix("hf:")
            save_adapter(model, aside / "adapter", base=base)
            model = merge_adapter(model)
        _write_weights(aside, job, model)
        if job.train.quantize == "int8":
            convert_int8(model, aside)
        if isinstance(task, SavesArtifacts):
            task.save_artifacts(aside)
        (aside / JOB_FILE).write_text(job.model_dump_json(indent=2))
        (aside / "README.md").write_text(
            mask(_card(run, job, task, model, lineage)), encoding="utf-8"
        )
        restrict_tree(aside)
        sync_tree(aside)  # a finished run is not resumed: its model must survive a power cut
        shutil.rmtree(published, ignore_errors=True)
        aside.rename(published)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if is_disk_full(error):
            raise TrainingError(
                f"No space left to export the model to {published}.",
                hint="The checkpoints are kept: free some space, then `yunlu resume`.",
            ) from error
        raise
    sync_directory(published.parent)
    return sorted(
        str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()
    )


def _write_weights(directory: Path, job: Job, model: nn.Module) -> None:
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:  # the layout that transformers reads back
        model.float()
        save_pretrained(directory, safe_serialization=True)
        return
    tensors, aliases = copy_weights(model)
    full_precision = {
        name: value.to(torch.float32) if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    # The aliases travel in the file's own header: a tied weight is stored once.
    save_file(
        full_precision, directory / "model.safetensors", metadata={"aliases": json.dumps(aliases)}
    )
    if isinstance(model, KerasModule):
        model.save(directory / KERAS_FILE)
    config = {"model": job.model.model_dump(mode="json"), "class": _class_name(model)}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def _card(
    run: RunStore,
    job: Job,
    task: Task,
    model: nn.Module,
    lineage: ModelLineage,
) -> str:
    parameters = sum(weight.numel() for weight in model.parameters())
    description = lineage.splits.about
    rows = [
        f"| {split} | {name} | {show_number(value)} |"
        for split, metrics in lineage.scores.items()
        for name, value in metrics.items()
    ]
    commit = lineage.environment.get("git_commit")
    lines = [
        "---",
        "library_name: yunlu",
        f"tags: [{job.task}]",
        "---",
        f"# {job.name or run.id}",
        "",
        f"A `{job.model.name}` model ({show_count(parameters)} parameters, FP32) for {job.task}.",
        f"Trained by Yunlu run `{run.id}` for {lineage.step} steps.",
        *_origin(job),
        "",
        "## Figures",
        "",
        "| split | metric | value |",
        "|---|---|---|",
        *rows,
        "",
        "## Data",
        "",
        f"- source: `{job.data.train}`",
        f"- fingerprint: `{lineage.splits.fingerprint}`",
        f"- training samples: {len(lineage.splits.train)}",
        *[
            f"- {key}: {value}"
            for key, value in description.items()
            if isinstance(value, (str, int, float)) and key != "source"
        ],
        "",
        "## Lineage",
        "",
        f"- code: {commit or 'not in a git repository'}",
        f"- packages: {_packages(lineage.environment)}",
        "- the whole job is in `job.json`; weights are in safetensors, which runs no code on loading",
        "",
        *_usage(run, task),
        "## Limits",
        "",
        "The figures hold for data like the test split. Nothing else was checked.",
        "",
    ]
    return "\n".join(lines)


def _usage(run: RunStore, task: Task) -> list[str]:
    """How to predict with it."""
    if not isinstance(task, Predicts):
        return []
    return [
        "## Use",
        "",
        "```python",
        "import yunlu",
        f'model = yunlu.load_model("{run.id}")  # or the path of this directory',
        "print(model.predict(inputs))  # a list of inputs like those of the training data",
        "```",
        "",
    ]


def _origin(job: Job) -> list[str]:
    """The base model it was fine-tuned from, and how."""
    start = describe_base(job.model)
    if start is None:
        return []
    adapter = job.model.adapter
    if adapter is None:
        return [f"Fine-tuned from `{start}`: every weight was trained."]
    how = f"with {adapter.name} (rank {adapter.rank})"
    where = "its updates are merged into these weights, and alone in `adapter/`"
    return [f"Fine-tuned from `{start}` {how}: {where}."]


def _packages(environment: dict[str, Any]) -> str:
    packages: dict[str, str] = environment.get("packages", {})
    return ", ".join(f"{name} {version}" for name, version in packages.items()) or "unknown"


_BATCH = 32


@dataclass(frozen=True, slots=True, repr=False)
class LoadedModel:
    """A trained model with the task that reads its inputs."""

    directory: Path
    """Its exported files."""
    job: Job
    """The job that trained it."""
    task: Task
    module: nn.Module

    def __repr__(self) -> str:
        return f"LoadedModel({str(self.directory)!r}, task={self.job.task!r})"

    def predict(self, inputs: Sequence[Any], *, batch: int = _BATCH) -> list[ModelPrediction]:
        """The answer to each input, in order.

        Args:
            inputs: Texts; paths, URLs or arrays of images and sounds; rows as mappings or lists of
                values; pairs of user and item.
            batch: Inputs computed at once.
        """
        assert isinstance(self.task, Predicts)
        if isinstance(inputs, str | bytes | Mapping):
            kind = type(inputs).__name__
            raise DataError(f"predict takes a list of inputs, not a {kind}.", hint="wrap it: [x]")
        answers: list[ModelPrediction] = []
        with torch.no_grad():
            for first in range(0, len(inputs), batch):
                answers += self.task.predict(self.module, inputs[first : first + batch])
        return answers


def load_model(directory: Path, *, trust_code: bool = False) -> LoadedModel:
    """Load an exported model: built in, Hugging Face, Keras or the user's own; INT8 if it has that."""
    directory = directory.absolute()
    path = directory / JOB_FILE
    if not path.is_file():
        raise ModelError(
            f"{directory} holds no exported model.",
            hint="name a finished run, or the model directory of one",
        )
    job = Job.model_validate(read_json(path))
    if job.task == "python:objects":
        raise ModelError(
            f"{directory} was trained from live Python objects, which cannot be built again.",
            hint="load its model.safetensors into your module",
        )
    if not trust_code:
        _refuse_code(job, directory)
    task = open_task(job.task)
    if not isinstance(task, Predicts):
        raise ModelError(
            f"The task {job.task} cannot predict: it has no methods restore and predict.",
            hint="see yunlu.training.tasks.task.Predicts",
        )
    exported = job.model_copy(update={"model": _exported_spec(job.model, directory)})
    try:
        task.restore(exported, directory)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{directory} lacks what its task needs to predict: {error!r}") from error
    module = task.build(exported)
    if (directory / INT8_FILE).is_file():
        load_int8(module, directory / INT8_FILE)
    elif not is_hf(module):
        load_exported(module, directory)
    return LoadedModel(directory, job, task, module.eval())


def _refuse_code(job: Job, directory: Path) -> None:
    """A directory from elsewhere must not name what is imported here."""
    for key, name in (("task", job.task), ("model.name", job.model.name)):
        if names_object(name) and not names_hf(name):
            raise ModelError(
                f"{directory / JOB_FILE}: {key} is {name}, which is code.",
                hint="if you know it: yunlu.load_model(..., trust_code=True)",
            )


def _exported_spec(spec: ModelSpec, directory: Path) -> ModelSpec:
    """How to build the model again: its weights, adapter included, are in the directory."""
    changes: dict[str, Any] = {"weights": None, "adapter": None}
    if names_hf(spec.name):
        changes |= {"name": f"hf:{directory}", "args": {}, "pretrained": True}
    elif spec.name.endswith(".keras") and (directory / KERAS_FILE).is_file():
        changes["name"] = str(directory / KERAS_FILE)
    return spec.model_copy(update=changes)
