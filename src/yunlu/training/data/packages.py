"""Data sets of other packages: scikit-learn's toy sets, Hugging Face ``datasets``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import DataError, YunluError, did_you_mean, missing_part
from yunlu.training.data.readers import columns_of_arrow
from yunlu.training.data.table import DataTable
from yunlu.training.models.hf import is_commit, split_revision

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.training.data.table import Column

SKLEARN = ("digits", "iris", "wine", "breast_cancer", "diabetes")
_ASK_S = 20.0
HF_MARKS = ("dataset_dict.json", "state.json")
"""Files that identify a folder written by ``save_to_disk``."""
# Split names in use, and the split they mean.
PARTS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def load_sklearn(name: str) -> DataTable:
    """A toy data set of scikit-learn: features and ``label`` (class names) or ``target``."""
    if name not in SKLEARN:
        raise DataError(f"no data set sklearn:{name}", hint=did_you_mean(name, SKLEARN))
    try:
        from sklearn import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("scikit-learn", "train", f"sklearn:{name}") from error

    if name == "digits":
        digits: Any = datasets.load_digits()
        images = (digits.images / 16.0).astype(np.float32)
        return DataTable({"image": images, "label": digits.target.astype(np.int64)})
    bunch: Any = (
        datasets.load_diabetes(scaled=False) if name == "diabetes" else _load(datasets, name)
    )
    columns: dict[str, Column] = {
        str(feature): np.asarray(bunch.data[:, index], dtype=np.float64)
        for index, feature in enumerate(bunch.feature_names)
    }
    if name == "diabetes":
        columns["target"] = np.asarray(bunch.target, dtype=np.float64)
    else:
        columns["label"] = [str(bunch.target_names[index]) for index in bunch.target]
    return DataTable(columns)


def load_hub(name: str) -> dict[str, DataTable]:
    """``NAME[@REVISION][:CONFIGURATION]`` from the Hugging Face hub; its splits by part."""
    datasets = _datasets(f"hf:{name}")
    repository, _, configuration = name.partition(":")
    repository, revision = split_revision(repository)
    try:
        # Data sets with code are refused: trust_remote_code is never passed.
        loaded = datasets.load_dataset(
            repository,
            configuration or None,
            revision=dataset_commit(repository, revision) or revision,
        )
    except Exception as error:  # the hub, its cache and each builder raise their own
        raise DataError(
            f"cannot load the data set hf:{name}: {_first_line(error)}",
            hint="check the name and the network; data sets that need a script are not supported",
        ) from error
    return _by_part(loaded, f"hf:{name}", fingerprint="")


@cache
def dataset_commit(repository: str, revision: str | None) -> str | None:
    """Commit that a revision (a branch, a tag; by default ``main``) of a data set stands for now.

    None where the hub cannot be asked; then the local cache, if any, decides.
    """
    if is_commit(revision):
        return revision
    from huggingface_hub import HfApi  # noqa: PLC0415 - comes with datasets

    try:
        return HfApi().dataset_info(repository, revision=revision, timeout=_ASK_S).sha
    except Exception:  # noqa: BLE001 - the loader tells what is wrong
        return None


def load_saved(folder: Path, fingerprint: str) -> dict[str, DataTable]:
    """A folder written by ``save_to_disk``; its splits by part."""
    datasets = _datasets(str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} is not a complete saved data set: {_first_line(error)}",
            hint="write it again with save_to_disk",
        ) from error
    return _by_part(loaded, str(folder), fingerprint=fingerprint)


def _by_part(loaded: Any, source: str, *, fingerprint: str) -> dict[str, DataTable]:
    splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    parts = {PARTS[name]: split for name, split in splits.items() if name in PARTS}
    if "train" not in parts:
        if len(splits) > 1:
            raise DataError(f"{source} has no split named train; it has {', '.join(splits)}")
        parts = {"train": next(iter(splits.values()))}
    return {
        part: DataTable(_columns(split), f"{fingerprint}:{part}" if fingerprint else "")
        for part, split in parts.items()
    }


def _columns(split: Any) -> dict[str, Column]:
    from datasets import Audio, ClassLabel, Image  # noqa: PLC0415 - optional

    classes: dict[str, list[str]] = {}
    for name, feature in split.features.items():
        if isinstance(feature, (Image, Audio)):
            # Kept encoded; the task decodes them.
            split = split.cast_column(name, type(feature)(decode=False))
        elif isinstance(feature, ClassLabel):
            classes[name] = feature.names
    columns = columns_of_arrow(split.with_format("arrow")[:])
    for name, names in classes.items():
        columns[name] = [names[int(index)] if index >= 0 else None for index in columns[name]]
    return columns


def _datasets(purpose: str) -> Any:
    try:
        import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("datasets", "hf", f"reading {purpose}") from error
    return datasets


def _load(datasets: Any, name: str) -> Any:
    return getattr(datasets, f"load_{name}")()


def _first_line(error: Exception) -> str:
    if isinstance(error, YunluError):
        return error.message
    return (str(error).splitlines() or [type(error).__name__])[0]
