"""Loading of an exported model, to predict with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import DataError, ModelError
from yunlu.core.imports import names_object
from yunlu.core.json_decode import read_json
from yunlu.spec.job import Job
from yunlu.training.export import JOB_FILE, KERAS_FILE
from yunlu.training.models.hf import is_hf, names_hf
from yunlu.training.models.initial_weights import load_exported
from yunlu.training.quantize import INT8_FILE, load_int8
from yunlu.training.tasks.registry import open_task
from yunlu.training.tasks.task import Predicts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from yunlu.spec.job import ModelSpec
    from yunlu.training.tasks.task import ModelPrediction, Task

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
