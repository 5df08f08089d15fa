"""A model cut into stages, each with a run of its layers and the names of the whole.

A stage is a shallow copy of the model that runs the model's own forward: where the layers of earlier
stages stood, what those stages sent is put in; where the layers of later ones stood, it ends. So
masks, positions and outputs are the model's own business, and nothing of any architecture is written
down here but which stack of layers to cut. What this cannot cut rightly, ``check`` finds out.
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
from yunlu.training.parallel.vocab_parallel import make_plain
from yunlu.training.tasks.task import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Inputs = tuple[Tensor, ...] | dict[str, Tensor]

_SECOND_STACK = 0.3
"""A second stack of layers this large beside the first means an encoder and a decoder."""


class PipelineStage(nn.Module):
    """Some layers of a model in a row; mixed into a copy of the model, whose class it keeps."""

    _passage: _Passage

    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Any:
        """What the next stage needs; on the last one, what the whole model returns."""
        named = inputs if isinstance(inputs, dict) else {}
        placed = () if isinstance(inputs, dict) else inputs
        if self._passage.forgets_cache:
            named = {**named, "use_cache": False}
        self._passage.hidden = hidden
        try:
            return super().forward(*placed, **named)
        except _LeftError as left:
            return make_plain(left.hidden)
        finally:
            self._passage.hidden = None


def why_not_split(model: nn.Module, stages: int) -> str | None:
    """Why a model cannot be cut into so many stages, in words; none where it can."""
    found = _find(model)
    if isinstance(found, str):
        return found
    units = len(_units(found.stack))
    if units < stages:
        return f"its {units} layers are fewer than {stages} stages"
    return None


def split(model: nn.Module, stages: int) -> list[PipelineStage]:
    """Cut a model into stages that share its weights; about equal work in each.

    Raises:
        ModelError: The model has no one stack of enough layers.
    """
    reason = why_not_split(model, stages)
    if reason is not None:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into {stages} stages: {reason}.",
            hint="choose a layout without pp, or with fewer stages",
        )
    anatomy = _find(model)
    assert not isinstance(anatomy, str)
    bounds = _share_out(model, anatomy, stages)
    return [
        _make_stage(model, anatomy, range(first, stop), number, stages)
        for number, (first, stop) in enumerate(pairwise(bounds))
    ]


def check(model: nn.Module, stages: Sequence[PipelineStage], inputs: Inputs) -> None:
    """Compare the stages, one after the other, with the whole model on a small batch.

    Raises:
        ModelError: They do not give the same, or miss a weight: the model must not be cut.
    """
    kept = {name for stage in stages for name in stage.state_dict()}
    missing = sorted(set(model.state_dict()) - kept)
    if missing:
        raise _cannot(model, f"no stage holds {missing[0]}")
    modes = [(module, module.training) for root in (model, *stages) for module in root.modules()]
    try:
        for root in (model, *stages):
            root.eval()
        with torch.no_grad():
            whole = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            hidden: Any = None
            for stage in stages:
                hidden = stage(inputs, hidden)
            expected, got = logits_of(whole), logits_of(hidden)
    except Exception as error:
        raise _cannot(model, f"its forward fails in parts ({error})") from error
    finally:
        for module, mode in modes:
            module.training = mode
    if expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-6, atol=1e-6):
        raise _cannot(model, "its layers do not only pass one tensor on")


def shared_names(stages: Sequence[nn.Module]) -> dict[str, list[int]]:
    """Weights that live on several stages, such as an embedding that is the output layer too."""
    where: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            where.setdefault(name, []).append(number)
    return {name: numbers for name, numbers in where.items() if len(numbers) > 1}


class _LeftError(Exception):
    """The layers of a stage are done."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Passage:
    """How what an earlier stage sent gets to its place in the copy."""

    forgets_cache: bool
    hidden: Tensor | None = None


class _Given(nn.Module):
    """Stands for everything that earlier stages did."""

    def __init__(self, passage: _Passage) -> None:
        super().__init__()
        self._passage = passage

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self._passage.hidden is not None
        return self._passage.hidden


class _End(nn.Module):
    """Stands for the first layer of the next stage."""

    def forward(self, *placed: Tensor, **named: Any) -> Tensor:
        raise _LeftError(placed[0] if placed else named["hidden_states"])


@dataclass(frozen=True, kw_only=True)
class _Anatomy:
    """Where things are in a model; names are paths from its root."""

    path: str
    stack: nn.Module
    before: tuple[str, ...]
    """Modules with weights that work before the layers."""
    after: tuple[str, ...]
    lent: tuple[str, ...]
    """Weights of ``before`` that work after the layers too."""


def _find(model: nn.Module) -> _Anatomy | str:
    stacks = dict(_stacks(model, ""))
    if not stacks:
        return "it has no list of layers that follow one another"
    sizes = {path: _count(stack) for path, stack in stacks.items()}
    path = max(sizes, key=lambda path: sizes[path])
    others = [other for other in stacks if other != path]
    for other in others:
        if sizes[other] > _SECOND_STACK * sizes[path]:
            return f"it has several stacks of layers ({other} and {path}), and only one can be cut"
    before, after = _surroundings(model, path)
    lent: list[str] = [*getattr(model, "lent_weights", ())]
    for first, other in _tied(model):
        if _is_under(first, before) and _is_under(other, after):
            lent.append(first)
        elif _region(first, path, before, after) != _region(other, path, before, after):
            return f"{first} and {other} are one weight in different layers"
    return _Anatomy(
        path=path, stack=stacks[path], before=before, after=after, lent=tuple(dict.fromkeys(lent))
    )


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Lists of layers that are in no other list of layers."""
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
    """Pairs of names of one weight: that of the whole model, and another."""
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
    """Layers with weights, each with those without that follow it: what is never cut apart."""
    children = list(stack.children())
    starts = [index for index, child in enumerate(children) if _count(child)]
    starts = [0, *starts[1:], len(children)]
    return [range(first, stop) for first, stop in pairwise(starts)]


def _share_out(model: nn.Module, anatomy: _Anatomy, stages: int) -> list[int]:
    """First layer of each stage, and the end: the largest share of work is as small as can be.

    Work goes with the weights that are multiplied: those of the layers, and the output layer's on
    the last stage. Looking up embeddings costs next to nothing.
    """
    children = list(anatomy.stack.children())
    units = _units(anatomy.stack)
    work = [sum(_count(children[index]) for index in unit) for unit in units]
    weights = dict(model.named_parameters(remove_duplicate=False))
    work[-1] += sum(
        weight.numel()
        for name, weight in weights.items()
        if _is_under(name, anatomy.after) or name in getattr(model, "lent_weights", ())
    )
    sums = [0]
    for amount in work:
        sums.append(sums[-1] + amount)
    # best[n]: the first n units in so many stages, as (largest share, evenness, cuts).
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
    model: nn.Module, anatomy: _Anatomy, own: range, number: int, count: int
) -> PipelineStage:
    kind = type(model)
    passage = _Passage(forgets_cache="use_cache" in inspect.signature(kind.forward).parameters)
    root = _copy_along(model, anatomy.path)
    stack = root.get_submodule(anatomy.path)
    for index, name in enumerate(list(dict(stack.named_children()))):
        if index not in own:
            stack.register_module(name, _Given(passage) if index < own.start else _End())
    is_last = number == count - 1
    if number:
        for path in anatomy.before:
            lent = [name for name in anatomy.lent if is_last and name.startswith(f"{path}.")]
            _replace(root, path, _stand_in(model, path, lent, passage))
    if not is_last:
        for path in anatomy.after:
            _replace(root, path, nn.Module())
    root.__class__ = type(f"{kind.__name__}Stage", (PipelineStage, kind), {})
    stage = cast("PipelineStage", root)
    stage.__dict__["_passage"] = passage
    return stage


def _copy_along(model: nn.Module, path: str) -> nn.Module:
    """The model with its own lists of children from the root down to the stack."""
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


def _stand_in(model: nn.Module, path: str, lent: Sequence[str], passage: _Passage) -> nn.Module:
    """For a module that works before the layers, on a later stage; with the weights it lends."""
    original = model.get_submodule(path)
    if isinstance(original, Embedding):
        ours = _copy(original)
        assert isinstance(ours, Embedding)
        ours.makes_vectors = False
        ours.position = None
        if not lent:
            ours.token = cast("nn.Embedding", None)
        return ours
    if isinstance(original, nn.ModuleList) and not lent:
        return nn.ModuleList(_Given(passage) for _ in original)
    given = _Given(passage)
    for name in lent:
        *inner, leaf = name.removeprefix(f"{path}.").split(".")
        holder: nn.Module = given
        for step in inner:
            if step not in dict(holder.named_children()):
                holder.register_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.register_parameter(leaf, model.get_parameter(name))
    return given


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _cannot(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be cut into stages: {reason}.",
        hint="choose a layout without pp",
    )
