"""Starting from trained weights: an earlier export, what it learned of its data, what is new.

Weights mean nothing without the tokenizer, labels and statistics they were trained with. So what
the start learned is read here for the tasks to reuse, and checked before a step is taken.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from yunlu.core.errors import ModelError
from yunlu.core.units import show_count
from yunlu.training.models.adapter import add_adapter, find_head, has_adapter
from yunlu.training.models.hf import find_hf_directory, fresh_weights, is_hf, names_hf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from yunlu.spec.job import Job, ModelSpec
    from yunlu.training.tasks.task import Task

_PARTS = ("preprocessing.json", "tabular.json", "recommendation.json")
# Labels are matched by name, sizes by the shapes of the weights, a tokenizer by its own words.
_MATCHED_ELSEWHERE = {"labels", "max_length", "tokenizer", "length", "height", "width", "target"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrigin:
    """Where a model's weights come from, and which of them no training has touched."""

    source: str
    taken: int
    """How many weights were taken over."""
    new: tuple[str, ...] = ()
    """Names of tensors that are new, wholly or in some rows."""
    labels: tuple[str, ...] = ()
    """Labels that the start did not know."""
    trained: int | None = None
    """How many weights the adapter trains; without one, all of them."""

    def __str__(self) -> str:
        words = f"starting from {self.source}: {show_count(self.taken)} weights taken"
        if self.labels:
            words += f"; new labels: {_listing(self.labels)}"
        if self.new:
            words += f"; new: {_listing(self.new)}"
        if self.trained is not None:
            words += f"; lora trains {show_count(self.trained)}"
        return words


def load_initial_weights(model: nn.Module, job: Job, task: Task) -> WeightsOrigin | None:
    """Give the model the weights it is to start from, then its adapter, both in place.

    Called once the task has loaded its data and built the model. None where training starts from
    random weights; refuses a start that does not fit the model or what the task made of the data.
    """
    spec = job.model
    directory = start_of(spec)
    if directory is None:
        if spec.adapter is not None:
            _refuse_random(spec)
            origin = WeightsOrigin(source=spec.name, taken=_count(model))
            return _adapt(model, job, origin)
        return None
    now = _parts_of(task)
    before = read_parts(spec)
    _check_parts(before, now, directory)
    if is_hf(model):
        origin = _take_hf(model, spec)
    else:
        origin = _take(model, directory, before.get("labels") or (), now.get("labels") or ())
    return origin if spec.adapter is None else _adapt(model, job, origin)


def start_of(spec: ModelSpec) -> Path | None:
    """The directory of the trained weights that the model begins with, if it does."""
    if names_hf(spec.name):
        if spec.weights is not None:
            raise ModelError(
                f"model.weights: {spec.name} brings its own weights.",
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


def read_parts(spec: ModelSpec) -> dict[str, Any]:
    """What the start learned of its data, as its task exported it; empty where there is nothing.

    For tasks to reuse: weights trained on one normalisation mean something else under another.
    """
    directory = start_of(spec)
    return {} if directory is None else _read_parts(directory)


def describe_start(spec: ModelSpec) -> str | None:
    """The start in a few words, for cards: the run where it is one, else the directory or name."""
    place = spec.weights or (spec.name if names_hf(spec.name) and spec.pretrained else None)
    if place is None:
        return None
    directory = Path(place.removeprefix("hf:")).expanduser()
    return _describe(directory) if directory.is_dir() else place


def _adapt(model: nn.Module, job: Job, origin: WeightsOrigin) -> WeightsOrigin:
    spec = job.model
    assert spec.adapter is not None
    if not has_adapter(model):
        add_adapter(model, spec.adapter, new=origin.new)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return replace(origin, trained=trained)


def _refuse_random(spec: ModelSpec) -> None:
    """An adapter beside random weights learns next to nothing, and nobody would see why."""
    may_be_trained = ":" in spec.name or spec.name.endswith(".keras")
    if names_hf(spec.name) or not may_be_trained:
        raise ModelError(
            f"model.adapter: {spec.name} would start from random weights, which are then frozen.",
            hint="start from trained ones: yunlu finetune RUN_OR_DIRECTORY JOB",
        )


def _take_hf(model: nn.Module, spec: ModelSpec) -> WeightsOrigin:
    new = fresh_weights(model)
    state = model.state_dict()
    fresh = sum(state[name].numel() for name in new if name in state)
    source = describe_start(spec) or spec.name
    return WeightsOrigin(source=source, taken=_count(model) - fresh, new=new)


def _take(
    model: nn.Module, directory: Path, before: Sequence[str], now: Sequence[str]
) -> WeightsOrigin:
    stored, wanted = _read_weights(directory), model.state_dict()
    _check_names(model, stored, wanted, directory)
    added = tuple(label for label in now if label not in before)
    new: list[str] = []
    if list(before) != list(now):
        head = _head_of(model, directory, added)
        for name in [name for name in wanted if name.startswith(f"{head}.")]:
            rows = _rows_by_label(stored[name], wanted[name], before, now)
            if rows is not None:
                stored[name] = rows
                new += [name] if added else []
    _check_shapes(stored, wanted, directory)
    model.load_state_dict(stored)
    source = _describe(directory)
    fresh = sum(wanted[name].numel() * len(added) // max(len(now), 1) for name in new)
    return WeightsOrigin(source=source, taken=_count(model) - fresh, new=tuple(new), labels=added)


def _describe(directory: Path) -> str:
    place = directory.absolute()
    is_run = (place.parent / "events.jsonl").is_file()
    return f"run {place.parent.name}" if is_run else place.name


def _read_weights(directory: Path) -> dict[str, Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ModelError(
            f"model.weights: {directory} holds no model.safetensors.",
            hint="name the model directory of a finished run",
        )
    try:
        with safe_open(path, framework="pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return tensors | {name: tensors[source] for name, source in aliases.items()}


def _check_names(
    model: nn.Module, stored: dict[str, Tensor], wanted: dict[str, Tensor], directory: Path
) -> None:
    missing, unknown = sorted(wanted.keys() - stored), sorted(stored.keys() - wanted)
    if not missing and not unknown:
        return
    said = [f"it lacks {_listing(missing)}"] if missing else []
    said += [f"it has {_listing(unknown)} besides"] if unknown else []
    raise ModelError(
        f"The weights in {directory} belong to another model than this "
        f"{type(model).__name__}: {'; '.join(said)}.",
        hint="model.name and model.args must be those of the start; `yunlu finetune` takes them over",
    )


def _check_shapes(stored: dict[str, Tensor], wanted: dict[str, Tensor], directory: Path) -> None:
    other = [
        f"{name} is {tuple(stored[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in wanted.items()
        if stored[name].shape != tensor.shape
    ]
    if other:
        raise ModelError(
            f"The weights in {directory} have other shapes: {_listing(other, most=4)}.",
            hint="model.args, data.max_length and the data's columns must be those of the start; "
            "`yunlu finetune` takes them over",
        )


def _head_of(model: nn.Module, directory: Path, added: tuple[str, ...]) -> str:
    head = find_head(model)
    if head is None:
        what = f"the labels {_listing(added)} are new" if added else "the labels differ"
        raise ModelError(
            f"{what}, but {type(model).__name__} does not end in a linear layer, so that the weights "
            f"for labels cannot be told from the others in {directory}.",
            hint="use the labels of the start",
        )
    return head


def _rows_by_label(
    stored: Tensor, fresh: Tensor, before: Sequence[str], now: Sequence[str]
) -> Tensor | None:
    """The head for these labels: rows of known labels taken over, the others as they were drawn."""
    fits = stored.shape == (len(before), *fresh.shape[1:]) and len(fresh) == len(now)
    if not fits:
        return None  # judged with the other shapes
    rows = fresh.clone()
    place = {label: row for row, label in enumerate(before)}
    for row, label in enumerate(now):
        if label in place:
            rows[row] = stored[place[label]].to(rows.dtype)
    return rows


def _parts_of(task: Task) -> dict[str, Any]:
    """What the task would export now, as it would be read back."""
    save: Any = getattr(task, "save_parts", None)
    if save is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="yunlu-parts-") as directory:
        save(Path(directory))
        return _read_parts(Path(directory))


def _read_parts(directory: Path) -> dict[str, Any]:
    for name in _PARTS:
        path = directory / name
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ModelError(f"{path} is not readable JSON: {error}") from error
            if not isinstance(found, dict):
                raise ModelError(f"{path} does not hold an object.")
            return found
    return {}


def _check_parts(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Refuse weights that were trained on inputs or outputs of another meaning."""
    if not before or not now:  # nothing is known of one side: a plain Hugging Face directory
        return
    shared = (before.keys() | now.keys()) - _MATCHED_ELSEWHERE
    other = sorted(key for key in shared if before.get(key) != now.get(key))
    if other:
        raise ModelError(
            f"The model in {directory} was trained with another {', '.join(other)} than this data "
            "gives, so its weights would be misread.",
            hint="bring the data into the form of the start's, or train without a start",
        )


def _count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _listing(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")
