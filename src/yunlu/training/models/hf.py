"""Hugging Face models: configuration and safetensors only; code and pickles in a directory never run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from yunlu.core.errors import ModelError, did_you_mean, missing_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from yunlu.spec.job import ModelSpec

_PREFIX = "hf:"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What a download may bring: no pickles, no code, no copies of the weights in subfolders.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]
# Aside, because a module cannot carry it without changing what it is.
_fresh: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def names_hf(name: str) -> bool:
    """Whether the name is ``hf:...`` or a directory with a Hugging Face configuration."""
    return name.startswith(_PREFIX) or (Path(name).expanduser() / "config.json").is_file()


def is_hf(model: nn.Module) -> bool:
    """Whether the module is a transformers model, which takes its inputs by name."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def fresh_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights that the loaded files did not have: a new head, a pooler."""
    return _fresh.get(model, ())


def find_hf_directory(name: str) -> Path:
    """The local directory of an ``hf:`` name, fetched from the hub where it is not a path."""
    place = name.removeprefix(_PREFIX)
    path = Path(place).expanduser()
    if path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(place) or place.startswith("."):
        raise ModelError(f"{name}: there is no directory {path.absolute()}.")
    return _download(place)


def load_hf(spec: ModelSpec, *, auto_class: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Load the weights, or only the configuration, into the given transformers ``AutoModel``.

    ``sizes`` and then ``spec.args`` override the configuration. Weights come as float32, whatever
    precision they were stored in: the optimiser needs it, and the plan casts where it pays.
    """
    transformers = _transformers(spec.name)
    directory = find_hf_directory(spec.name)
    config = _read_config(directory, spec, sizes)
    if getattr(config, "transformers_weights", None) is not None:
        raise ModelError(f"{spec.name}: config.json names its own weights file, which is not read.")
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
            hint="check that the directory holds a model of this kind, whole and unaltered",
        ) from error
    _check_fit(spec, model, report, sizes)
    _match_labels(model, directory, sizes)
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    _fresh[model] = tuple(sorted({*report["missing_keys"], *mismatched} & set(model.state_dict())))
    return model


def _transformers(name: str) -> Any:
    try:
        import transformers  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("transformers", "hf", f"The model {name}") from error
    return transformers


def _download(name: str) -> Path:
    _transformers(name)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with transformers

    try:
        found = snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except Exception as error:
        raise ModelError(
            f"hf:{name} is not a directory here and cannot be fetched from the hub: {_reason(error)}",
            hint="check the name and the network, or give the path of a downloaded model",
        ) from error
    return Path(found)


def _read_config(directory: Path, spec: ModelSpec, sizes: Mapping[str, Any]) -> Any:
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{spec.name}: {directory} has no config.json.",
            hint="a Hugging Face model directory holds config.json and model.safetensors",
        )
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(written, dict):
        raise ModelError(f"{path} does not hold a configuration: it is not an object.")
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


def _check_weights(directory: Path) -> None:
    """The directory must hold its weights as safetensors, and nothing else may be read."""
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"{directory} holds an adapter, not a whole model.")
    if any(directory.glob("shard-*-model-*.safetensors")):
        raise ModelError(f"{directory} holds a distributed checkpoint, not an exported model.")
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
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
    """Refuse weights of another shape or another model; only a head for labels may differ."""
    labels = sizes.get("num_labels")
    for key, stored, wanted in sorted(report["mismatched_keys"]):
        if labels is None or wanted[:1] != (labels,) or stored[1:] != wanted[1:]:
            raise ModelError(
                f"{spec.name}: the weight {key} is {tuple(stored)} in the file, "
                f"but the configuration asks for {tuple(wanted)}.",
                hint="config.json (or model.args) does not belong to these weights",
            )
    wanted = set(model.state_dict())
    if wanted and wanted <= set(report["missing_keys"]):
        raise ModelError(
            f"{spec.name}: none of the weights in the file belong to a {type(model).__name__}.",
            hint="set model.pretrained: false to start from random weights",
        )


def _match_labels(model: Any, directory: Path, sizes: Mapping[str, Any]) -> None:
    """Put the rows of the head in the order of the job's labels, where they are the same ones."""
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    before = [name for _, name in sorted((written.get("id2label") or {}).items(), key=_by_number)]
    now = list(sizes.get("id2label", {}).values())
    if before == now or set(before) != set(now) or len(before) != len(now):
        return
    order = [before.index(name) for name in now]
    prefix = f"{model.base_model_prefix}."
    answers = [
        module
        for name, module in model.named_modules()
        if getattr(module, "out_features", None) == len(now) and not name.startswith(prefix)
    ]
    for weight in answers[-1].parameters() if answers else ():
        weight.data = weight.data[order].clone()


def _by_number(item: tuple[str, str]) -> int:
    return int(item[0])


def _reason(error: Exception) -> str:
    """The first sentence of an error that may be pages long."""
    text = " ".join(str(error).split())
    return f"{text[:300]}…" if len(text) > 300 else text or type(error).__name__
