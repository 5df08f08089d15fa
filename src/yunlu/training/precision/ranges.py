"""Modules that may compute in low precision, and their value ranges, probed in one step.

A range is a histogram of magnitudes by power of two. Values that are exactly zero in a precision with
the range of FP32 (after a ReLU, in an unused row of an embedding) are true zeros and do not
count: underflow is distinguished from sparsity.

Probes of one step: its value ranges, and the first module whose output is not finite.
Hooks exist only during a probe, and results are read from the device once at the end: a step without
a probe costs nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle


# Attention as a unit: it never calls its inner projection. Others may contain parametrisations.
_LOWERED = (nn.MultiheadAttention, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_NEVER_LOWERED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
_LOW = (torch.float16, torch.bfloat16)


def find_candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose products autocast lowers, by name: those that own matrices."""
    candidates: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_covered(name, candidates) or isinstance(module, _NEVER_LOWERED):
            continue
        is_leaf = next(module.children(), None) is None
        weights = module.parameters(recurse=False)
        if isinstance(module, _LOWERED) or (
            is_leaf and any(_is_matrix(weight) for weight in weights)
        ):
            candidates[name] = module
    return candidates


def is_covered(name: str, chosen: Container[str]) -> bool:
    """Whether the module, or a parent of it, is among the chosen."""
    while name and name not in chosen:
        name = name.rpartition(".")[0]
    return name in chosen


def is_movable(module: nn.Module) -> bool:
    """False if other code has replaced ``forward`` on the instance."""
    return "forward" not in vars(module)


def run_in_full(module: nn.Module) -> None:
    """Make the module compute in FP32, also under autocast."""
    # A bound method, unlike a closure, is rebound to the copy by a deep copy of the module.
    vars(module)["forward"] = MethodType(_forward_in_full, module)


def run_as_given(module: nn.Module) -> None:
    """Undo ``run_in_full``."""
    vars(module).pop("forward", None)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):  # model outputs of Hugging Face too
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim >= 2 and weight.is_floating_point()


def _forward_in_full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward: Callable[..., Any] = type(self).forward
    kind = next(tensors_in((args, kwargs)), torch.empty(0)).device.type
    if not torch.is_autocast_enabled(kind):
        return forward(self, *args, **kwargs)
    with torch.autocast(kind, enabled=False):
        return forward(self, *_in_fp32(args), **_in_fp32(kwargs))


def _in_fp32(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.float() if values.dtype in _LOW else values
    if isinstance(values, PackedSequence):
        return values.to(torch.float32) if values.data.dtype in _LOW else values
    if isinstance(values, dict):
        return {key: _in_fp32(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        inside = [_in_fp32(value) for value in values]
        if hasattr(values, "_fields"):  # a named tuple takes its fields one by one
            return type(values)(*inside)
        return type(values)(inside)
    return values


_LOWEST = -150
"""One below FP32's smallest power of two: the bin of exact zeros."""
_BINS = 280
_SAMPLE = 1 << 16
LOST_SHARE = 0.05
"""A gradient or an activation may lose this share of its sum of magnitudes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """Limits of a floating-point format."""

    name: str
    largest: float
    lowest_power: int
    """Values below this power of two round to zero."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> FloatFormat:
        """The limits of a floating-point type, subnormal numbers included."""
        limits = torch.finfo(dtype)
        smallest = math.log2(limits.smallest_normal * limits.eps)
        return cls(name=name, largest=limits.max, lowest_power=round(smallest) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """Magnitudes of one kind of tensor in one module, in one step."""

    top: float
    """Largest magnitude; not finite if any value was not."""
    counts: tuple[float, ...] = ()
    """Histogram by power of two, from ``_LOWEST`` on."""

    def band(self, form: FloatFormat) -> tuple[int, int]:
        """Scale factors, as powers of two, between which the format represents these values.

        At the lower end only ``LOST_SHARE`` of them rounds to zero; at the upper end the largest
        still fits twice over.
        """
        shares = self._shares()
        first = int(np.searchsorted(shares, LOST_SHARE, side="right"))
        lowest = form.lowest_power - (_LOWEST + 1 + first) if first < len(shares) else -_BINS
        highest = math.floor(math.log2(form.largest / self.top)) - 1 if self.top else _BINS
        return lowest, highest

    def lost_share(self, power: int, form: FloatFormat) -> float:
        """Share of the sum of magnitudes that rounds to zero after a factor of ``2**power``."""
        shares, lost = self._shares(), form.lowest_power - power - (_LOWEST + 1)
        return float(shares[min(lost, len(shares)) - 1]) if lost > 0 and len(shares) else 0.0

    def _shares(self) -> np.ndarray:
        """Share of the sum of magnitudes up to each power of two; empty where all are zero."""
        # Weighted by magnitude: many tiny values may vanish without harm.
        powers = np.arange(_LOWEST + 1, _LOWEST + len(self.counts))
        masses = np.asarray(self.counts[1:]) * np.exp2(powers, dtype=np.float64)
        total = masses.sum()
        return masses.cumsum() / total if total else np.empty(0)


def measure(values: Tensor) -> Tensor:
    """The range of a tensor as one small tensor on its device, without synchronising."""
    flat = values.detach().float().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE) | 1  # odd: not aligned with rows and columns
    sizes = flat[::stride].abs().log2().nan_to_num(nan=128.0).clamp(_LOWEST, 128)
    counts = torch.bincount((sizes.floor() - _LOWEST).long(), minlength=_BINS)
    return torch.cat([flat.abs().amax()[None], counts])


def merge(measured: Sequence[Tensor]) -> Tensor:
    """The range of several tensors together."""
    stacked = torch.stack(list(measured))
    return torch.cat([stacked[:, 0].amax()[None], stacked[:, 1:].sum(0)])


def read(measured: Mapping[tuple[str, str], Sequence[Tensor]]) -> dict[tuple[str, str], ValueRange]:
    """Read ranges from the device in one transfer."""
    if not measured:
        return {}
    rows: list[list[float]] = torch.stack(
        [merge(tensors) for tensors in measured.values()]
    ).tolist()
    return {
        key: ValueRange(top=top, counts=tuple(counts))
        for key, (top, *counts) in zip(measured, rows, strict=True)
    }


FORWARD = ("inputs", "outputs", "weights")
BACKWARD = ("input gradients", "output gradients", "weight gradients")
_RATIO_SAMPLE = 1 << 12


class RangeProbe:
    """Ranges of activations and gradients in a step that runs with the range of FP32.

    Values that FP16 would lose are still visible there: overflow and underflow are predicted for each
    module, instead of inferred from infinities and zeros afterwards.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._measured: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._weight_hooks: list[RemovableHandle] = []
        self._before: dict[str, list[Tensor]] = {}

    @contextmanager
    def hooks(self) -> Generator[None]:
        """Hooks around the forward pass of each micro-batch; gradients are recorded in the backward pass."""
        if not self._weight_hooks:
            self._hook_weights()
        hooks: list[RemovableHandle] = []
        for name, module in self._modules.items():
            entering, leaving = partial(self._enter, name), partial(self._leave, name)
            hooks.append(module.register_forward_pre_hook(entering))
            hooks.append(module.register_forward_hook(leaving))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before_update(self) -> None:
        """Sample each module's weights before the update."""
        self._before = {name: _sample(module) for name, module in self._modules.items()}

    def read_ratios(self) -> dict[str, float]:
        """Relative update size of each module's weights."""
        pairs: dict[str, Tensor] = {}
        for name, before in self._before.items():
            if before:
                old, new = torch.cat(before), torch.cat(_sample(self._modules[name]))
                pairs[name] = torch.stack([(new - old).norm(), old.norm()])
        if not pairs:
            return {}
        rows: list[list[float]] = torch.stack(list(pairs.values())).tolist()
        return {
            name: moved / norm
            for name, (moved, norm) in zip(pairs, rows, strict=True)
            if norm > 0  # undefined for weights that start at zero
        }

    def read_ranges(self) -> dict[str, dict[str, ValueRange]]:
        """Ranges by module and kind."""
        self.close()
        by_module: dict[str, dict[str, ValueRange]] = {}
        for (name, kind), span in read(self._measured).items():
            by_module.setdefault(name, {})[kind] = span
        return by_module

    def close(self) -> None:
        """Remove the remaining hooks."""
        for hook in self._weight_hooks:
            hook.remove()
        self._weight_hooks = []

    def _hook_weights(self) -> None:
        for name, module in self._modules.items():
            for weight in module.parameters():
                if weight.is_floating_point() and weight.numel():
                    self._record(name, "weights", weight)
                    if weight.requires_grad:
                        record = partial(self._record, name, "weight gradients")
                        self._weight_hooks.append(weight.register_hook(record))

    def _enter(self, name: str, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A separate view gives this module's gradient, not that of others with the same input;
        # one view for each tensor, since attention checks whether query and key are identical.
        views: dict[int, Tensor] = {}
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                self._record(name, "inputs", value)
                if value.requires_grad and id(value) not in views:
                    views[id(value)] = value.view_as(value)
                    views[id(value)].register_hook(partial(self._record, name, "input gradients"))
        return tuple(views.get(id(value), value) for value in args)

    def _leave(self, name: str, _module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> Any:
        # A hook on a view is lost if the next layer works in place; one on a copy is not.
        outputs = outputs.clone() if isinstance(outputs, Tensor) else outputs
        for value in tensors_in(outputs):
            if value.is_floating_point() and value.numel():
                self._record(name, "outputs", value)
                if value.requires_grad:
                    value.register_hook(partial(self._record, name, "output gradients"))
        return outputs

    def _record(self, name: str, kind: str, values: Tensor) -> None:
        with torch.no_grad():
            self._measured[name, kind].append(measure(values))


class FiniteProbe:
    """Finds the modules where a low-precision forward pass first stops being finite."""

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        self._model, self._candidates = model, candidates
        self._names: list[str] = []
        self._flags: list[Tensor] = []

    @contextmanager
    def hooks(self) -> Generator[None]:
        """Hooks around the forward pass of each micro-batch."""
        hooks = [
            module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
            for name, module in self._model.named_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def read_culprits(self) -> list[str]:
        """Innermost modules with finite inputs and infinite outputs, in forward order."""
        if not self._flags:
            return []
        rows: list[list[bool]] = torch.stack(self._flags).tolist()
        culprits: list[str] = []
        for name, (bad_input, bad_output) in zip(self._names, rows, strict=True):
            # Inner modules finish first: an inner culprit explains its parent.
            explained = any(is_covered(culprit, (name,)) for culprit in culprits)
            if bad_output and not bad_input and not explained:
                culprits.append(name)
        return culprits

    def _leave(
        self,
        name: str,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> None:
        trusted = name in self._candidates
        # Masks may contain minus infinity; other tensors without gradient are ignored.
        results = [value for value in tensors_in(outputs) if trusted or value.requires_grad]
        with torch.no_grad():
            bad_input = _any(
                ~value.isfinite() if value.requires_grad else value.isnan() | value.isposinf()
                for value in tensors_in((args, kwargs))
                if value.is_floating_point()
            )
            bad_output = _any(~value.isfinite() for value in results if value.is_floating_point())
        if bad_output is not None:
            bad_input = torch.zeros_like(bad_output) if bad_input is None else bad_input
            self._names.append(name)
            self._flags.append(torch.stack([bad_input.to(bad_output.device), bad_output]))


def _any(parts: Generator[Tensor]) -> Tensor | None:
    by_module = [part.any() for part in parts]
    return torch.stack(by_module).any() if by_module else None


def _sample(module: nn.Module) -> list[Tensor]:
    """A small sample of the weights."""
    weights = [
        weight.detach().reshape(-1) for weight in module.parameters() if weight.requires_grad
    ]
    return [weight[:: max(1, len(weight) // _RATIO_SAMPLE)].float().clone() for weight in weights]
