"""INT8 and FP8 linear layers with torchao: quantisation-aware training, INT8 export, FP8 products.

The layers are swapped in place and keep the names and values of their weights, so checkpoints and
exports keep full precision. Embeddings, norms and layers that share their weight with
an embedding are not swapped.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from yunlu.core.errors import ModelError, missing_part
from yunlu.core.limits import decode_json
from yunlu.training.device import is_accelerator, kind_of
from yunlu.training.tensor_slices import copy_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

INT8_FILE = "model.int8.safetensors"

_SCALE = "_scale"
"""Suffix of the dequantisation scales of an INT8 weight: one for each row."""
_SCHEME = "int8 weights per row, int8 activations per token (asymmetric, computed at run time)"
_FP8_MULTIPLE = 16  # the products of FP8 units take edges that are multiples of this


def prepare_int8(model: nn.Module) -> nn.Module:
    """Prepare a model for quantisation-aware INT8 training (fake quantisation), in place.

    Gradients use the straight-through estimator (Bengio et al. 2013).
    """
    qat = _torchao("train.quantize=int8").qat
    activations = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    names = _linear_names(model)
    if not names:
        raise ModelError(
            "train.quantize=int8: the model has no plain linear layer to quantise.",
            hint="Remove train.quantize: other layers stay in full precision.",
        )
    # Torch's fast path for attention reads weights of linear layers without calling their forward.
    torch.backends.mha.set_fastpath_enabled(value=False)
    return _swap(
        model, names, lambda old: qat.FakeQuantizedLinear.from_linear(old, activations, weights)
    )


def convert_int8(model: nn.Module, directory: Path) -> Path:
    """Export the INT8 weights of a prepared model; the model is not changed.

    A plain safetensors file: ``<layer>.weight`` in INT8 with ``<layer>.weight_scale``, all else in FP32.
    """
    library = _torchao("train.quantize=int8")
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, library.qat.FakeQuantizedLinear)
    ]
    tensors, aliases = copy_weights(model)
    for name, value in tensors.items():
        if value.is_floating_point():
            tensors[name] = value.to(torch.float32)
    for name in names:
        key = _weight_key(name)
        rounded = library.Int8Tensor.from_hp(tensors[key], granularity=library.PerRow())
        tensors[key], tensors[key + _SCALE] = rounded.qdata, rounded.scale
    metadata = {"layers": json.dumps(names), "aliases": json.dumps(aliases), "scheme": _SCHEME}
    path = directory / INT8_FILE
    save_file(tensors, path, metadata=metadata)
    return path


def load_int8(model: nn.Module, path: Path) -> nn.Module:
    """Fill a model of the same architecture with the weights of an INT8 file; in place, for the CPU."""
    library = _torchao("an INT8 model")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        layers: list[str] = decode_json(metadata["layers"])
        aliases: dict[str, str] = decode_json(metadata["aliases"])
        integers = {
            name: (tensors.pop(_weight_key(name)), tensors.pop(_weight_key(name) + _SCALE))
            for name in layers
        }
        rest = tensors | {name: tensors[source] for name, source in aliases.items()}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not an INT8 model: {error}") from error
    tensors_by_name = rest | {_weight_key(name): codes for name, (codes, _) in integers.items()}
    if _shapes(tensors_by_name) != _shapes(model.state_dict()):
        raise ModelError(
            f"{path} does not fit the model: its layers have other names or shapes.",
            hint="Build the model from the config.json beside the file.",
        )
    model.load_state_dict(rest, strict=False)
    for name, (codes, scale) in integers.items():
        weight = _integer_weight(library, codes, scale)
        layer = model.get_submodule(name)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    return model


def fp8_problem(device: torch.device) -> str | None:
    """Why this device cannot train with FP8 products; None if it can."""
    if find_spec("torchao") is None:
        return (
            'fp8 needs the package torchao, which is not installed: pip install "yunlu[quantize]"'
        )
    needed = "fp8 needs an NVIDIA GPU of compute capability 8.9 or newer, or an AMD MI300"
    if not is_accelerator(device):
        return f"{needed}; this device is {device.type}."
    problem = kind_of(device.type).fp8_problem(device.index or 0)
    return None if problem is None else f"{needed}; {problem}."


def convert_to_fp8(
    model: nn.Module, device: torch.device | None, *, emulate: bool = False
) -> list[str]:
    """Multiply in FP8 in the linear layers whose shape allows it; in place, returns their names.

    Without a ``device`` none is asked whether it can. ``emulate`` rounds to FP8 and multiplies in full
    precision: for tests, on any device.
    """
    problem = None if emulate or device is None else fp8_problem(device)
    if problem is not None:
        raise ModelError(problem, hint="Use train.precision: auto.")
    library = _torchao("train.precision=fp8")
    names = [
        name
        for name in _linear_names(model)
        if name and not any(edge % _FP8_MULTIPLE for edge in _weight_of(model, name).shape)
    ]
    # Padded: the weight gradient sums over the tokens of a batch, whose number is arbitrary.
    config = library.float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    chosen = set(names)

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name in chosen

    library.float8.convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)
    return names


def _linear_names(model: nn.Module) -> list[str]:
    """Plain linear layers with a weight of their own.

    Subclasses are excluded: torch's own attention reads their weights without calling them.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and owners[id(module.weight)] == 1
    ]


def _swap(
    model: nn.Module, names: list[str], replace: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    for name in names:
        old = model.get_submodule(name)
        new = replace(old).train(old.training)
        if not name:  # the model is one linear layer
            return new
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def _integer_weight(library: _TorchAO, codes: Tensor, scale: Tensor) -> Tensor:
    block = [1, codes.shape[1]]
    zero = torch.zeros_like(scale, dtype=torch.int8)
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        how = library.workflows.QuantizeTensorToInt8Kwargs(
            granularity=library.PerRow(), mapping_type=library.MappingType.ASYMMETRIC
        )
        return library.Int8Tensor(
            codes, scale, block, torch.float32, zero_point=zero, act_quant_kwargs=how
        )
    # Without AVX-512 torch's integer product is a plain loop, 37 times slower than FP32 where
    # measured; stored in INT8 and multiplied in FP32, the same numbers take three times as long as FP32.
    return library.IntxUnpackedToInt8Tensor(
        codes, scale, zero, torch.int8, tuple(block), torch.float32, "int8_asym_per_token"
    )


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(_weight_key(name))


def _weight_key(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


class _TorchAO:
    """The torchao modules used here, imported together."""

    def __init__(self) -> None:
        from torchao import float8  # noqa: PLC0415
        from torchao.quantization import (  # noqa: PLC0415
            Int8Tensor,
            IntxUnpackedToInt8Tensor,
            MappingType,
            PerRow,
            qat,
        )
        from torchao.quantization.quantize_ import workflows  # noqa: PLC0415

        self.qat: Any = qat
        self.float8: Any = float8
        self.workflows: Any = workflows
        self.Int8Tensor: Any = Int8Tensor
        self.IntxUnpackedToInt8Tensor: Any = IntxUnpackedToInt8Tensor
        self.MappingType: Any = MappingType
        self.PerRow: Any = PerRow


def _torchao(purpose: str) -> _TorchAO:
    try:
        with _quiet("torchao", "torch.utils._pytree"):
            return _TorchAO()
    except ImportError as error:
        raise missing_part("torchao", "quantize", purpose) from error


@contextmanager
def _quiet(*names: str) -> Generator[None]:
    """Silence torchao's import-time warnings about missing GPU kernels and deprecations."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
