"""Initial weights for fine-tuning: loading an earlier export and its preprocessing.

Weights are useless without the tokenizer, labels and statistics they were trained with. These
artifacts are read here for the tasks to reuse, and checked before the first step.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from yunlu.core.errors import ModelError
from yunlu.core.limits import decode_json, read_json
from yunlu.core.units import show_count
from yunlu.training.models.adapter import add_adapter, find_head, has_adapter
from yunlu.training.models.hf import find_hf_directory, is_hf, names_hf, new_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from yunlu.spec.job import Job, ModelSpec
    from yunlu.training.tasks.task import Task

_ARTIFACT_FILES = ("preprocessing.json", "tabular.json", "recommendation.json")
# Labels are matched by name, sizes by weight shapes, a tokenizer by its vocabulary.
_MATCHED_ELSEWHERE = {
    "labels", "max_length", "longest_answer", "tokenizer", "length", "height", "width", "target", "size",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrigin:
    """Origin of a model's initial weights, and which of them are random."""

    source: str
    taken: int
    """Number of weights loaded."""
    new: tuple[str, ...] = ()
    """Names of tensors with random values, in full or in some rows."""
    labels: tuple[str, ...] = ()
    """Labels that the base model does not have."""
    trained: int | None = None
    """Number of weights that the adapter trains; None without an adapter."""

    def __str__(self) -> str:
        description = f"starting from {self.source}: {show_count(self.taken)} weights loaded"
        if self.labels:
            description += f"; new labels: {_listing(self.labels)}"
        if self.new:
            description += f"; new: {_listing(self.new)}"
        if self.trained is not None:
            description += f"; lora trains {show_count(self.trained)}"
        return description


def load_initial_weights(model: nn.Module, job: Job, task: Task) -> WeightsOrigin | None:
    """Load the initial weights into the model, then add its adapter, both in place.

    Called once the task has loaded its data and built the model. None for random weights; refuses a
    base model that does not fit the model or the task's preprocessing.
    """
    spec = job.model
    directory = base_directory(spec)
    if directory is None:
        if spec.adapter is not None:
            _refuse_random(spec)
            origin = WeightsOrigin(source=spec.name, taken=_count(model))
            return _adapt(model, job, origin)
        return None
    now = _artifacts_of(task)
    before = read_artifacts(spec)
    _check_artifacts(before, now, directory)
    if is_hf(model):
        origin = _loaded_hf_weights(model, spec)
    else:
        origin = _load_weights(
            model, directory, before.get("labels") or (), now.get("labels") or ()
        )
    return origin if spec.adapter is None else _adapt(model, job, origin)


def base_directory(spec: ModelSpec) -> Path | None:
    """Directory of the initial weights; None for random weights."""
    if names_hf(spec.name):
        if spec.weights is not None:
            raise ModelError(
                f"model.weights: {spec.name} has its own weights.",
                hint="name one of them: model.name: hf:DIRECTORY, or a built-in with model.weights",
            )
        return find_hf_directory(spec.name) if spec.pretrained else None
    if spec.weights is None:
        return None
    directory = Path(spec.weights).expanduser()
    if not directory.is_dir():
        raise ModelError(
            f"model.weights: there is no directory {directory.absolute()}.",
            hint="name the model directory of a finished run, or use: yunlu finetune RUN JOB",
        )
    return directory


def read_artifacts(spec: ModelSpec) -> dict[str, Any]:
    """Preprocessing artifacts of the base model; empty if there are none.

    For tasks to reuse: weights depend on the normalisation they were trained with.
    """
    directory = base_directory(spec)
    return {} if directory is None else read_exported(directory)


def describe_base(spec: ModelSpec) -> str | None:
    """Short name of the base model, for model cards: its run, directory or name."""
    base = spec.weights or (spec.name if names_hf(spec.name) and spec.pretrained else None)
    if base is None:
        return None
    directory = Path(base.removeprefix("hf:")).expanduser()
    return _describe(directory) if directory.is_dir() else base


def _adapt(model: nn.Module, job: Job, origin: WeightsOrigin) -> WeightsOrigin:
    spec = job.model
    assert spec.adapter is not None
    if not has_adapter(model):
        add_adapter(model, spec.adapter, new=origin.new)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return replace(origin, trained=trained)


def _refuse_random(spec: ModelSpec) -> None:
    """Refuse an adapter on random weights: it would learn next to nothing."""
    may_be_trained = ":" in spec.name or spec.name.endswith(".keras")
    if names_hf(spec.name) or not may_be_trained:
        raise ModelError(
            f"model.adapter: {spec.name} would start from random weights, which are then frozen.",
            hint="start from trained ones: yunlu finetune RUN_OR_DIRECTORY JOB",
        )


def _loaded_hf_weights(model: nn.Module, spec: ModelSpec) -> WeightsOrigin:
    new = new_weights(model)
    state = model.state_dict()
    fresh = sum(state[name].numel() for name in new if name in state)
    source = describe_base(spec) or spec.name
    return WeightsOrigin(source=source, taken=_count(model) - fresh, new=new)


def _load_weights(
    model: nn.Module, directory: Path, before: Sequence[str], now: Sequence[str]
) -> WeightsOrigin:
    stored, expected = _read_weights(directory), model.state_dict()
    _check_names(model, stored, expected, directory)
    added = tuple(label for label in now if label not in before)
    new: list[str] = []
    if list(before) != list(now):
        head = _head_of(model, directory, added)
        for name in [name for name in expected if name.startswith(f"{head}.")]:
            rows = _rows_by_label(stored[name], expected[name], before, now)
            if rows is not None:
                stored[name] = rows
                new += [name] if added else []
    _check_shapes(stored, expected, directory)
    model.load_state_dict(stored)
    source = _describe(directory)
    fresh = sum(expected[name].numel() * len(added) // max(len(now), 1) for name in new)
    return WeightsOrigin(source=source, taken=_count(model) - fresh, new=tuple(new), labels=added)


def load_exported(model: nn.Module, directory: Path) -> None:
    """Load exported weights into a model of the same architecture."""
    stored, expected = _read_weights(directory), model.state_dict()
    _check_names(model, stored, expected, directory)
    _check_shapes(stored, expected, directory)
    model.load_state_dict(stored)


def _describe(directory: Path) -> str:
    path = directory.absolute()
    is_run = (path.parent / "events.jsonl").is_file()
    return f"run {path.parent.name}" if is_run else path.name


def _read_weights(directory: Path) -> dict[str, Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ModelError(
            f"model.weights: {directory} holds no model.safetensors.",
            hint="name the model directory of a finished run",
        )
    try:
        with safe_open(path, framework="pt") as file:
            aliases = decode_json((file.metadata() or {}).get("aliases", "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        return tensors | {name: tensors[source] for name, source in aliases.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged: its aliases name weights it does not hold."
        ) from error


def _check_names(
    model: nn.Module, stored: dict[str, Tensor], expected: dict[str, Tensor], directory: Path
) -> None:
    missing, unknown = sorted(expected.keys() - stored), sorted(stored.keys() - expected)
    if not missing and not unknown:
        return
    differences = [f"it lacks {_listing(missing)}"] if missing else []
    differences += [f"it has {_listing(unknown)} besides"] if unknown else []
    raise ModelError(
        f"The weights in {directory} belong to another model than this "
        f"{type(model).__name__}: {'; '.join(differences)}.",
        hint="model.name and model.args must equal the base model's; `yunlu finetune` sets them",
    )


def _check_shapes(stored: dict[str, Tensor], expected: dict[str, Tensor], directory: Path) -> None:
    other = [
        f"{name} is {tuple(stored[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in expected.items()
        if stored[name].shape != tensor.shape
    ]
    if other:
        raise ModelError(
            f"The weights in {directory} have other shapes: {_listing(other, most=4)}.",
            hint="model.args, data.max_length and the data's columns must equal the base model's; "
            "`yunlu finetune` sets them",
        )


def _head_of(model: nn.Module, directory: Path, added: tuple[str, ...]) -> str:
    head = find_head(model)
    if head is None:
        what = f"the labels {_listing(added)} are new" if added else "the labels differ"
        raise ModelError(
            f"{what}, but {type(model).__name__} does not end in a linear layer, so the weights "
            f"of the labels in {directory} cannot be identified.",
            hint="use the labels of the base model",
        )
    return head


def _rows_by_label(
    stored: Tensor, fresh: Tensor, before: Sequence[str], now: Sequence[str]
) -> Tensor | None:
    """The head for these labels: rows of known labels loaded, the others random."""
    fits = stored.shape == (len(before), *fresh.shape[1:]) and len(fresh) == len(now)
    if not fits:
        return None  # reported with the other shapes
    rows = fresh.clone()
    row_of = {label: row for row, label in enumerate(before)}
    for row, label in enumerate(now):
        if label in row_of:
            rows[row] = stored[row_of[label]].to(rows.dtype)
    return rows


def _artifacts_of(task: Task) -> dict[str, Any]:
    """Artifacts that the task would export now, read back."""
    save: Any = getattr(task, "save_artifacts", None)
    if save is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="yunlu-parts-") as directory:
        save(Path(directory))
        return read_exported(Path(directory))


def read_exported(directory: Path) -> dict[str, Any]:
    """Artifacts beside exported weights; empty if there are none."""
    for name in _ARTIFACT_FILES:
        path = directory / name
        if path.is_file():
            artifacts = read_json(path)
            if not isinstance(artifacts, dict):
                raise ModelError(f"{path} does not hold an object.")
            return artifacts
    return {}


def _check_artifacts(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Refuse weights trained with other preprocessing."""
    if not before or not now:  # no artifacts on one side: a plain Hugging Face directory
        return
    shared = (before.keys() | now.keys()) - _MATCHED_ELSEWHERE
    other = sorted(key for key in shared if before.get(key) != now.get(key))
    if other:
        raise ModelError(
            f"The model in {directory} was trained with another {', '.join(other)} than this data "
            "has, so its weights do not fit.",
            hint="convert the data to the base model's form, or train from random weights",
        )


def _count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _listing(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")
