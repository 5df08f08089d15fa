"""Hugging Face models: configuration and safetensors only; never executes code or pickles."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from yunlu.core.errors import ModelError, did_you_mean, missing_part
from yunlu.core.limits import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from yunlu.spec.job import ModelSpec

_PREFIX = "hf:"
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Files to download: no pickles, no code, no copies of the weights in subfolders.
_ALLOWED = ["*.json", "*.safetensors", "*.txt", "*.model"]
_IGNORED = ["*/*", "consolidated*"]
# Not on the module, which must not change.
_new_weights: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def names_hf(name: str) -> bool:
    """Whether the name is ``hf:...`` or a directory with a Hugging Face configuration."""
    return name.startswith(_PREFIX) or (Path(name).expanduser() / "config.json").is_file()


def is_hf(model: nn.Module) -> bool:
    """Whether the module is a transformers model, which takes its inputs by name."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def new_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights missing in the loaded files: a new head, a pooler."""
    return _new_weights.get(model, ())


def find_hf_directory(name: str) -> Path:
    """The local directory of an ``hf:`` name; downloads it from the hub unless it is a path."""
    target = name.removeprefix(_PREFIX)
    path = Path(target).expanduser()
    if path.is_dir():
        return path
    match = _HUB_NAME.fullmatch(target)
    if match is None or target.startswith("."):
        raise ModelError(f"{name}: there is no directory {path.absolute()}.")
    return _download(match["name"], match["revision"])


def split_revision(name: str) -> tuple[str, str | None]:
    """Name and revision of ``NAME@REVISION``: a commit, branch or tag of a repository on the hub."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def hub_commit(directory: Path) -> str | None:
    """Commit of files that were fetched from the hub, whose cache names directories by it."""
    is_fetched = directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name)
    return directory.name if is_fetched else None


def is_commit(revision: str | None) -> bool:
    """Whether a revision names one commit for good; a branch or tag can be moved to another."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def load_hf(spec: ModelSpec, *, auto_class: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Load the weights, or only the configuration, into the given transformers ``AutoModel``.

    ``sizes`` and then ``spec.args`` override the configuration. Weights are float32, whatever
    the stored precision: the optimiser needs it.
    """
    transformers = _transformers(spec.name)
    directory = find_hf_directory(spec.name)
    config = _read_config(directory, spec, sizes)
    if getattr(config, "transformers_weights", None) is not None:
        raise ModelError(
            f"{spec.name}: config.json names its own weights file, which is not supported."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{spec.name} holds quantised weights, which cannot be trained.",
            hint="use the original weights of this model",
        )
    loader = getattr(transformers, auto_class)
    if spec.pretrained:
        _check_weights(directory)
    import torch  # noqa: PLC0415 - keeps this module light for `names_hf`

    try:
        if not spec.pretrained:
            return loader.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model, report = loader.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            # A head for other labels is replaced; any other mismatch is refused below.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(
            f"{spec.name} cannot be loaded as {auto_class}: {_reason(error)}",
            hint="check that the directory holds a complete model of this kind",
        ) from error
    _check_fit(spec, model, report, sizes)
    _match_labels(model, directory, sizes)
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    _new_weights[model] = tuple(
        sorted({*report["missing_keys"], *mismatched} & set(model.state_dict()))
    )
    return model


def _transformers(name: str) -> Any:
    try:
        import transformers  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("transformers", "hf", f"The model {name}") from error
    return transformers


@cache
def _download(name: str, revision: str | None) -> Path:
    """Once in a process: model and tokenizer are of the same commit, though a branch moves meanwhile."""
    _transformers(name)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with transformers

    try:
        # Resolves a branch to its commit first: all files are of the same one.
        directory = snapshot_download(
            name, revision=revision, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED
        )
    except Exception as error:
        raise ModelError(
            f"hf:{name} is not a directory here and cannot be fetched from the hub: {_reason(error)}",
            hint="check the name and the network, or give the path of a downloaded model",
        ) from error
    return Path(directory)


def _read_config(directory: Path, spec: ModelSpec, sizes: Mapping[str, Any]) -> Any:
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{spec.name}: {directory} has no config.json.",
            hint="a Hugging Face model directory holds config.json and model.safetensors",
        )
    check_config(path, spec.args)
    try:
        config, unused = _transformers(spec.name).AutoConfig.from_pretrained(
            directory,
            trust_remote_code=False,
            local_files_only=True,
            return_unused_kwargs=True,
            **{**sizes, **spec.args},
        )
    except Exception as error:
        raise ModelError(
            f"{path} is not a configuration that can be used: {_reason(error)}"
        ) from error
    for name in spec.args:
        if name in unused:
            raise ModelError(
                f"model.args.{name}: the configuration of {spec.name} has no such key.",
                hint=did_you_mean(name, config.to_dict()),
            )
    return config


def check_config(path: Path, args: Mapping[str, Any]) -> None:
    """Refuse a configuration that is none, or that names code on the hub.

    transformers takes an attention or experts implementation with a ``/`` for the name of a repository
    of kernels, and asks the hub for it, whatever ``local_files_only`` and ``trust_remote_code`` say.
    """
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a configuration: it is not an object.")
    for where, key, value in (*_implementations(config), *_implementations(args)):
        names = value.values() if isinstance(value, dict) else [value]
        for name in names:
            if isinstance(name, str) and not _IMPLEMENTATION.fullmatch(name):
                raise ModelError(
                    f"{path}: {where}{key} is {name!r}: a kernel from the hub, which is code.",
                    hint="remove the key, or write eager, sdpa or flash_attention_2",
                )


_IMPLEMENTATION = re.compile(r"[A-Za-z0-9_|]*")


def _implementations(config: Any, where: str = "") -> Iterator[tuple[str, str, Any]]:
    """Keys that choose an implementation, also of nested configurations."""
    if isinstance(config, list):
        for number, value in enumerate(config):
            yield from _implementations(value, f"{where}{number}.")
    elif isinstance(config, dict):
        for key, value in config.items():
            if re.search(r"_implementation(_internal)?$", str(key)):
                yield where, str(key), value
            elif isinstance(value, dict | list):
                yield from _implementations(value, f"{where}{key}.")


def _check_weights(directory: Path) -> None:
    """Check that the directory holds its weights as safetensors."""
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"{directory} holds an adapter, not a full model.")
    if any(directory.glob("shard-*-model-*.safetensors")):
        raise ModelError(f"{directory} holds a distributed checkpoint, not an exported model.")
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return
    if index.is_file():
        try:
            files = set(read_json(index)["weight_map"].values())
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of weights.") from error
        for file in sorted(files):
            if not str(file).endswith(".safetensors") or Path(file).name != file:
                raise ModelError(
                    f"{index} names {file!r}, which is not a safetensors file beside it."
                )
            if not (directory / file).is_file():
                raise ModelError(f"{index} names {file!r}, which is missing.")
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ModelError(
            f"{directory} holds its weights as a pickle, which can run code when it is read.",
            hint="convert it where you trust it: "
            "AutoModel.from_pretrained(DIR).save_pretrained(NEW, safe_serialization=True)",
        )
    raise ModelError(
        f"{directory} holds no weights (model.safetensors).",
        hint="set model.pretrained: false to start from random weights",
    )


def _check_fit(
    spec: ModelSpec, model: Any, report: dict[str, Any], sizes: Mapping[str, Any]
) -> None:
    """Refuse weights of another shape or model; only a classification head may differ."""
    labels = sizes.get("num_labels")
    for key, stored, expected in sorted(report["mismatched_keys"]):
        if labels is None or expected[:1] != (labels,) or stored[1:] != expected[1:]:
            raise ModelError(
                f"{spec.name}: the weight {key} is {tuple(stored)} in the file, "
                f"but the configuration expects {tuple(expected)}.",
                hint="config.json (or model.args) does not belong to these weights",
            )
    expected = set(model.state_dict())
    if expected and expected <= set(report["missing_keys"]):
        raise ModelError(
            f"{spec.name}: none of the weights in the file belong to a {type(model).__name__}.",
            hint="set model.pretrained: false to start from random weights",
        )


def _match_labels(model: Any, directory: Path, sizes: Mapping[str, Any]) -> None:
    """Reorder the rows of the head by the job's labels, if they are the same set."""
    config_json = read_json(directory / "config.json")
    before = [
        name for _, name in sorted((config_json.get("id2label") or {}).items(), key=_by_number)
    ]
    now = list(sizes.get("id2label", {}).values())
    if before == now or set(before) != set(now) or len(before) != len(now):
        return
    order = [before.index(name) for name in now]
    prefix = f"{model.base_model_prefix}."
    heads = [
        module
        for name, module in model.named_modules()
        if getattr(module, "out_features", None) == len(now) and not name.startswith(prefix)
    ]
    for weight in heads[-1].parameters() if heads else ():
        weight.data = weight.data[order].clone()


def _by_number(item: tuple[str, str]) -> int:
    return int(item[0])


def _reason(error: Exception) -> str:
    """A short form of a long error message."""
    text = " ".join(str(error).split())
    return f"{text[:300]}…" if len(text) > 300 else text or type(error).__name__
