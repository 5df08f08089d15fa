"""Activation checkpointing: activations are recomputed in the backward pass (Chen et al. 2016).

``full`` saves only the inputs of each repeated block; ``selective`` also saves the results of matrix
products and attention, and recomputes the cheap rest.
Blocks keep their names, weights and class: their ``forward`` is replaced, on the instance.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from yunlu.core.errors import ModelError
from yunlu.training.memory.peak import peak_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from yunlu.planning.planner import RecomputeMode

_RULE = "_yunlu_recompute"
_aten = torch.ops.aten
_COSTLY = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._addmm_activation.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_mm.default,
    _aten._int_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}


def apply_recompute(model: nn.Module, mode: RecomputeMode, *, share: float = 1.0) -> list[str]:
    """Recompute the activations of the first ``share`` of the model's blocks; returns their names.

    An earlier call is undone first; ``none`` only undoes it. Nothing is recomputed
    in evaluation mode.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    _undo(model)
    if mode == "none":
        return []
    blocks = find_blocks(model)
    if not blocks:
        raise ModelError(
            f"train.recompute is {mode}, but {type(model).__name__} has no repeated blocks to "
            "recompute.",
            hint="Set train.recompute to none and lower train.micro_batch, or keep the model's "
            "layers in an nn.ModuleList or nn.Sequential.",
        )
    # Rounded first: a share of 2/3 of three blocks is two of them, not three.
    chosen = blocks[: math.ceil(round(share * len(blocks), 6))]
    for block in chosen:
        block.set(selective=mode == "selective")
    if any(_is_hf_layer(block.module) for block in chosen):
        _switch_hf_stacks(model, on=True)
    return [block.name for block in chosen]


def recompute_savings(model: nn.Module, run_pass: Callable[[], Any]) -> dict[RecomputeMode, float]:
    """Peak bytes of one pass with each mode that the model allows.

    ``run_pass`` does one forward and backward. Weights and their gradients do not count. Gradients
    and random numbers change; the model is left without recomputation.
    """
    peaks: dict[RecomputeMode, float] = {}
    modes: tuple[RecomputeMode, ...] = ("none", "selective", "full")
    run_pass()  # allocates the gradients, which must not count
    for mode in modes if find_blocks(model) else modes[:1]:
        apply_recompute(model, mode)
        peaks[mode] = float(peak_bytes(run_pass))
    _undo(model)
    return peaks


@dataclass(frozen=True, slots=True)
class RecomputedBlock:
    """A module that can be recomputed, or a range of layers of an nn.Sequential."""

    name: str
    module: nn.Module
    layers: slice | None = None

    def set(self, *, selective: bool) -> None:
        """Enable recomputation of this block."""
        module: Any = self.module
        if self.layers is not None:
            rules: tuple[_Segment, ...] = getattr(module, _RULE, ())
            setattr(module, _RULE, (*rules, _Segment(self.layers, selective)))
            module.forward = MethodType(_run_segments, module)
        elif _is_hf_layer(module):
            setattr(module, _RULE, selective)
            _switch_hf(module, on=True)
            module._gradient_checkpointing_func = MethodType(_run_hf_layer, module)
        else:
            setattr(module, _RULE, selective)
            module.forward = MethodType(_run_block, module)


@dataclass(frozen=True, slots=True)
class _Segment:
    layers: slice
    selective: bool


def find_blocks(model: nn.Module) -> list[RecomputedBlock]:
    """The outermost repeated blocks; where there are none, even runs of long nn.Sequentials."""
    # transformers marks its blocks itself, and handles side effects inside them.
    layers = [
        RecomputedBlock(name, part) for name, part in model.named_modules() if _is_hf_layer(part)
    ]
    return layers or list(_repeated(model, "")) or list(_segments(model, ""))


def _repeated(module: nn.Module, above: str) -> Iterator[RecomputedBlock]:
    twins = Counter[type[nn.Module]]()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        # A single layer saves its input anyway: only blocks of several layers gain.
        twins = Counter(type(part) for part in module if next(part.children(), None) is not None)
    for name, part in module.named_children():
        if twins[type(part)] > 1 and _can_run_alone(part):
            yield RecomputedBlock(f"{above}{name}", part)
        else:
            yield from _repeated(part, f"{above}{name}.")


def _can_run_alone(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # containers such as a ModuleList cannot


def _segments(module: nn.Module, above: str) -> Iterator[RecomputedBlock]:
    if type(module) is nn.Sequential:
        units = _units(module)
        if len(units) > 1:
            yield from _even(module, above.rstrip("."), units)
            return
    for name, part in module.named_children():
        yield from _segments(part, f"{above}{name}.")


def _units(layers: nn.Sequential) -> list[int]:
    """Start indices of units: a matrix or convolution with its norm and activation."""
    heavy = [
        index
        for index, layer in enumerate(layers)
        if any(weight.ndim > 1 for weight in layer.parameters())
    ]
    return [0, *heavy[1:]]


def _even(layers: nn.Sequential, name: str, units: list[int]) -> Iterator[RecomputedBlock]:
    # The square root of the depth needs the least memory: Chen et al. 2016, section 4.1.
    count = math.ceil(math.sqrt(len(units)))
    starts = [units[len(units) * index // count] for index in range(count)]
    for start, end in zip(starts, [*starts[1:], len(layers)], strict=True):
        yield RecomputedBlock(f"{name}[{start}:{end}]", layers, slice(start, end))


def _run_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(self).forward, self)
    if not self.training:
        return forward(*args, **kwargs)
    return _recomputed(forward, (self,), getattr(self, _RULE), *args, **kwargs)


def _run_hf_layer(self: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    return _recomputed(forward, (self,), getattr(self, _RULE), *args)


def _run_segments(self: nn.Sequential, value: Any) -> Any:
    if not self.training:
        return nn.Sequential.forward(self, value)
    layers, done = list(self), 0
    for rule in getattr(self, _RULE):
        segment = tuple(layers[rule.layers])
        value = _recomputed(partial(_run_in_turn, segment), segment, rule.selective, value)
        done = rule.layers.stop
    return _run_in_turn(tuple(layers[done:]), value)


def _run_in_turn(layers: tuple[nn.Module, ...], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _recomputed(
    forward: Callable[..., Any],
    parts: tuple[nn.Module, ...],
    selective: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if torch.compiler.is_compiling():
        # The compiler sees both passes as one program, in which buffers change once.
        again = forward
    else:
        again = _with_original_buffers(forward, parts)
        # Saved results that a layer overwrites in place would be wrong in the recomputation.
        selective = selective and not any(
            getattr(layer, "inplace", False) for part in parts for layer in part.modules()
        )
    if not selective:
        return checkpoint(again, *args, use_reentrant=False, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, _keep_costly)
    if torch.is_autocast_cache_enabled() and not torch.compiler.is_compiling():
        again = partial(_without_autocast_cache, again)
    return checkpoint(again, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_costly(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op not in _COSTLY or _draws(op, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: attention with dropout must be recomputed."""
    names = [argument.name for argument in op._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return bool(arguments.get("dropout_p"))


def _without_autocast_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run without the autocast cache: a weight must be cast in both runs, or in neither."""
    torch.set_autocast_cache_enabled(False)
    try:
        return forward(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)


def _with_original_buffers(
    forward: Callable[..., Any], parts: tuple[nn.Module, ...]
) -> Callable[..., Any]:
    """Restore the buffers of the first run in the recomputation: running averages change once."""
    owners = [peaks for part in parts for peaks in _persistent_buffers(part)]
    if not owners:
        return forward
    before: list[Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        now = [owner._buffers[name] for owner, name in owners]
        if not before:
            before.extend(buffer.clone() for buffer in now)
            return forward(*args, **kwargs)
        try:
            for (owner, name), buffer in zip(owners, before, strict=True):
                owner._buffers[name] = buffer.clone()
            return forward(*args, **kwargs)
        finally:
            for (owner, name), buffer in zip(owners, now, strict=True):
                owner._buffers[name] = buffer

    return run


def _persistent_buffers(part: nn.Module) -> Iterator[tuple[Any, str]]:
    owner: Any
    for owner in part.modules():
        for name, buffer in owner._buffers.items():
            # Non-persistent buffers are tables, not state.
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield owner, name


def _undo(model: nn.Module) -> None:
    for module in model.modules():
        if module.__dict__.pop(_RULE, None) is None:
            continue
        if _is_hf_layer(module):
            _switch_hf(module, on=False)
            _switch_hf_stacks(model, on=False)
        else:
            del module.forward


def _is_hf_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _switch_hf_stacks(model: nn.Module, *, on: bool) -> None:
    """Switch the stacks too: they drop their cache while training, which recomputation would corrupt.

    transformers' own switch would also make frozen embeddings ask for gradients.
    """
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing") and not _is_hf_layer(module):
            _switch_hf(module, on=on)


def _switch_hf(module: Any, *, on: bool) -> None:
    module.gradient_checkpointing = on
    module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
