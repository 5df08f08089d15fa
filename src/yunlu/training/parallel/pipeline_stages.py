"""Splitting of a model into pipeline stages, each with a range of its layers and the original names.

A stage is a shallow copy of the model that runs the model's own forward: layers of earlier stages are
replaced by the received activation; at the first layer of a later stage it returns. Masks, positions
and outputs stay the model's own, and nothing here depends on the architecture except the choice of the
stack of layers. ``check`` detects models that this cannot split correctly.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from yunlu.core.errors import ModelError
from yunlu.training.models.transformer import Embedding
from yunlu.training.parallel.tensor_parallel import make_plain
from yunlu.training.tasks.task import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Inputs = tuple[Tensor, ...] | dict[str, Tensor]

_SECOND_STACK = 0.3
"""Relative size of a second stack that indicates an encoder and a decoder."""


class PipelineStage(nn.Module):
    """A range of layers of a model; mixed into a copy of the model, whose class it keeps."""

    _stage_input: _StageInput

    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Any:
        """Activation for the next stage; on the last stage, the output of the model."""
        named = inputs if isinstance(inputs, dict) else {}
        placed = () if isinstance(inputs, dict) else inputs
        if self._stage_input.forgets_cache:
            named = {**named, "use_cache": False}
        self._stage_input.hidden = hidden
        try:
            return super().forward(*placed, **named)
        except _StageEndError as end:
            return make_plain(end.hidden)
        finally:
            self._stage_input.hidden = None


def why_not_split(model: nn.Module, stages: int) -> str | None:
    """Why a model cannot be split into this many stages; None if it can."""
    structure = _find(model)
    if isinstance(structure, str):
        return structure
    units = len(_units(structure.stack))
    if units < stages:
        return f"its {units} layers are fewer than {stages} stages"
    return None


def split(model: nn.Module, stages: int) -> list[PipelineStage]:
    """Split a model into stages that share its weights, of about equal work.

    Raises:
        ModelError: The model has no single stack of enough layers.
    """
    reason = why_not_split(model, stages)
    if reason is not None:
        raise ModelError(
            f"{type(model).__name__} cannot be split into {stages} stages: {reason}.",
            hint="choose a layout without pp, or with fewer stages",
        )
    structure = _find(model)
    assert not isinstance(structure, str)
    bounds = _balance(model, structure, stages)
    return [
        _make_stage(model, structure, range(first, stop), number, stages)
        for number, (first, stop) in enumerate(pairwise(bounds))
    ]


def check(model: nn.Module, stages: Sequence[PipelineStage], inputs: Inputs) -> None:
    """Compare the stages in sequence with the full model on a small batch.

    Raises:
        ModelError: Results differ, or a weight is missing: the model cannot be split.
    """
    held = {name for stage in stages for name in stage.state_dict()}
    missing = sorted(set(model.state_dict()) - held)
    if missing:
        raise _cannot(model, f"no stage holds {missing[0]}")
    modes = [(module, module.training) for root in (model, *stages) for module in root.modules()]
    try:
        for root in (model, *stages):
            root.eval()
        with torch.no_grad():
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            hidden: Any = None
            for stage in stages:
                hidden = stage(inputs, hidden)
            expected, got = logits_of(output), logits_of(hidden)
    except Exception as error:
        raise _cannot(model, f"its forward fails in stages ({error})") from error
    finally:
        for module, mode in modes:
            module.training = mode
    if expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-6, atol=1e-6):
        raise _cannot(model, "its layers pass on more than one tensor")


def shared_names(stages: Sequence[nn.Module]) -> dict[str, list[int]]:
    """Weights held by several stages, such as an embedding tied to the output layer."""
    where: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            where.setdefault(name, []).append(number)
    return {name: numbers for name, numbers in where.items() if len(numbers) > 1}


class _StageEndError(Exception):
    """Raised after the last layer of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _StageInput:
    """Passes the received activation to its placeholder in the copy."""

    forgets_cache: bool
    hidden: Tensor | None = None


class _Placeholder(nn.Module):
    """Placeholder for the layers of earlier stages: returns the received activation."""

    def __init__(self, stage_input: _StageInput) -> None:
        super().__init__()
        self._stage_input = stage_input

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self._stage_input.hidden is not None
        return self._stage_input.hidden


class _End(nn.Module):
    """Placeholder for the first layer of the next stage: ends the forward pass."""

    def forward(self, *placed: Tensor, **named: Any) -> Tensor:
        raise _StageEndError(placed[0] if placed else named["hidden_states"])


@dataclass(frozen=True, kw_only=True)
class _Structure:
    """Location of the layer stack and its surroundings; names are paths from the root."""

    path: str
    stack: nn.Module
    before: tuple[str, ...]
    """Modules with weights that run before the layers."""
    after: tuple[str, ...]
    lent: tuple[str, ...]
    """Weights of ``before`` that are also used after the layers."""


def _find(model: nn.Module) -> _Structure | str:
    stacks = dict(_stacks(model, ""))
    if not stacks:
        return "it has no list of layers that follow one another"
    sizes = {path: _count(stack) for path, stack in stacks.items()}
    path = max(sizes, key=lambda path: sizes[path])
    others = [other for other in stacks if other != path]
    for other in others:
        if sizes[other] > _SECOND_STACK * sizes[path]:
            return (
                f"it has several stacks of layers ({other} and {path}), and only one can be split"
            )
    before, after = _surroundings(model, path)
    lent: list[str] = [*getattr(model, "lent_weights", ())]
    for first, other in _tied(model):
        if _is_under(first, before) and _is_under(other, after):
            lent.append(first)
        elif _region(first, path, before, after) != _region(other, path, before, after):
            return f"{first} and {other} are one weight in different layers"
    return _Structure(
        path=path, stack=stacks[path], before=before, after=after, lent=tuple(dict.fromkeys(lent))
    )


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Outermost lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        layers = [child for child in module if _count(child)]
        if len(layers) > 1 and not all(isinstance(layer, nn.Embedding) for layer in layers):
            yield path, module
            return
    for name, child in module.named_children():
        yield from _stacks(child, f"{path}.{name}" if path else name)


def _surroundings(model: nn.Module, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    before: list[str] = []
    after: list[str] = []
    parent, prefix = model, ""
    for step in path.split(".") if path else ():
        is_passed = False
        for name, child in parent.named_children():
            if name == step:
                is_passed = True
            elif child.state_dict():
                embeds = any(isinstance(inner, nn.Embedding) for inner in child.modules())
                comes_first = embeds or (not is_passed and "final" not in name)
                (before if comes_first else after).append(f"{prefix}{name}")
        parent, prefix = cast("nn.Module", getattr(parent, step)), f"{prefix}{step}."
    return tuple(before), tuple(after)


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and alias of each tied weight."""
    names: dict[Tensor, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if names.setdefault(weight, name) != name:
            yield names[weight], name


def _region(name: str, path: str, before: Sequence[str], after: Sequence[str]) -> str:
    if _is_under(name, before):
        return "before"
    if _is_under(name, after):
        return "after"
    if path and not name.startswith(f"{path}."):
        return "everywhere"
    return name.removeprefix(f"{path}.").partition(".")[0]


def _is_under(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _units(stack: nn.Module) -> list[range]:
    """Indivisible units: a layer with weights and the following layers without."""
    children = list(stack.children())
    starts = [index for index, child in enumerate(children) if _count(child)]
    starts = [0, *starts[1:], len(children)]
    return [range(first, stop) for first, stop in pairwise(starts)]


def _balance(model: nn.Module, structure: _Structure, stages: int) -> list[int]:
    """First layer of each stage, and the end; minimises the largest work of a stage.

    Work is proportional to the multiplied weights: those of the layers, and of the output layer on
    the last stage. Embedding lookups cost next to nothing.
    """
    children = list(structure.stack.children())
    units = _units(structure.stack)
    work = [sum(_count(children[index]) for index in unit) for unit in units]
    weights = dict(model.named_parameters(remove_duplicate=False))
    work[-1] += sum(
        weight.numel()
        for name, weight in weights.items()
        if _is_under(name, structure.after) or name in getattr(model, "lent_weights", ())
    )
    sums = [0]
    for amount in work:
        sums.append(sums[-1] + amount)
    # best[n]: split of the first n units, as (largest work, sum of squares, cuts).
    best = {0: (0, 0, (0,))}
    for stage in range(stages):
        rest = stages - stage - 1
        best = {
            stop: min(
                (
                    max(largest, sums[stop] - sums[first]),
                    squares + (sums[stop] - sums[first]) ** 2,
                    (*cuts, stop),
                )
                for first, (largest, squares, cuts) in best.items()
                if first < stop
            )
            for stop in range(stage + 1, len(units) - rest + 1)
        }
    cuts = best[len(units)][2]
    return [*(units[cut].start for cut in cuts[:-1]), len(children)]


def _make_stage(
    model: nn.Module, structure: _Structure, own_layers: range, number: int, count: int
) -> PipelineStage:
    kind = type(model)
    stage_input = _StageInput(
        forgets_cache="use_cache" in inspect.signature(kind.forward).parameters
    )
    root = _copy_along(model, structure.path)
    stack = root.get_submodule(structure.path)
    for index, name in enumerate(list(dict(stack.named_children()))):
        if index not in own_layers:
            stack.register_module(
                name, _Placeholder(stage_input) if index < own_layers.start else _End()
            )
    is_last = number == count - 1
    if number:
        for path in structure.before:
            lent = [name for name in structure.lent if is_last and name.startswith(f"{path}.")]
            _replace(root, path, _make_placeholder(model, path, lent, stage_input))
    if not is_last:
        for path in structure.after:
            _replace(root, path, nn.Module())
    root.__class__ = type(f"{kind.__name__}Stage", (PipelineStage, kind), {})
    stage = cast("PipelineStage", root)
    stage.__dict__["_stage_input"] = stage_input
    return stage


def _copy_along(model: nn.Module, path: str) -> nn.Module:
    """Copy of the model whose modules from the root to the stack are copied."""
    root = parent = _copy(model)
    for step in path.split(".") if path else ():
        child = _copy(cast("nn.Module", getattr(parent, step)))
        parent.register_module(step, child)
        parent = child
    return root


def _copy(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    for registry in ("_modules", "_parameters", "_buffers"):
        copied.__dict__[registry] = dict(module.__dict__[registry])
    return copied


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent).register_module(name, module)


def _make_placeholder(
    model: nn.Module, path: str, lent: Sequence[str], stage_input: _StageInput
) -> nn.Module:
    """Placeholder on a later stage for a module before the layers; with its shared weights."""
    original = model.get_submodule(path)
    if isinstance(original, Embedding):
        copied = _copy(original)
        assert isinstance(copied, Embedding)
        copied.makes_vectors = False
        copied.position = None
        if not lent:
            copied.token = cast("nn.Embedding", None)
        return copied
    if isinstance(original, nn.ModuleList) and not lent:
        return nn.ModuleList(_Placeholder(stage_input) for _ in original)
    placeholder = _Placeholder(stage_input)
    for name in lent:
        *inner, leaf = name.removeprefix(f"{path}.").split(".")
        holder: nn.Module = placeholder
        for step in inner:
            if step not in dict(holder.named_children()):
                holder.register_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.register_parameter(leaf, model.get_parameter(name))
    return placeholder


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _cannot(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be split into stages: {reason}.",
        hint="choose a layout without pp",
    )
