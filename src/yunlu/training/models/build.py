"""Building of models by name: built in, Hugging Face, Keras, or the user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from torch import nn

from yunlu.core.errors import ModelError, YunluError, did_you_mean, nearest
from yunlu.core.imports import import_object, names_object
from yunlu.core.settings import use_keras_on_torch
from yunlu.training.models.hf import is_hf, load_hf, names_hf
from yunlu.training.models.keras import as_module, load_keras

if TYPE_CHECKING:
    from yunlu.spec.job import ModelSpec

__all__ = ["Builder", "build_model", "check_call", "is_hf"]

Builder = Callable[..., nn.Module]


def build_model(
    spec: ModelSpec,
    *,
    builtins: Mapping[str, Builder],
    sizes: Mapping[str, Any],
    auto_class: str | None = None,
    hf_sizes: Mapping[str, Any] = {},
) -> nn.Module:
    """Build or load the model that ``spec`` names.

    Args:
        spec: Name and arguments of the model, and whether to load weights.
        builtins: The task's own models by name; each takes ``sizes`` and the user's arguments.
        sizes: Sizes given by the data, such as ``classes`` or ``vocabulary``.
        auto_class: The transformers class for this task; without it ``hf:`` models are refused.
        hf_sizes: Sizes in a Hugging Face configuration, such as ``num_labels``.
    """
    if spec.name in builtins:
        return _build_builtin(spec, builtins[spec.name], sizes)
    if names_hf(spec.name):
        if auto_class is None:
            raise ModelError(
                f"{spec.name}: this task does not support Hugging Face models.",
                hint=f"built in: {', '.join(sorted(builtins))}; or your own module:Class",
            )
        return load_hf(spec, auto_class=auto_class, sizes=hf_sizes)
    if spec.name.endswith(".keras"):
        return load_keras(spec)
    if names_object(spec.name):
        return _build_own(spec, sizes)
    raise ModelError(
        f"There is no model {spec.name!r} for this task.",
        hint=f"{did_you_mean(spec.name, builtins)}; or hf:DIRECTORY, FILE.keras, module:Class",
    )


def check_call(model: nn.Module, inputs: Sequence[str]) -> None:
    """Check that a module can be called with these inputs by position."""
    try:
        inspect.signature(model.forward).bind(*inputs)
    except TypeError as error:
        raise ModelError(
            f"{type(model).__name__}.forward does not take ({', '.join(inputs)}): {error}.",
            hint="this task calls the model with these inputs, by position",
        ) from error


def _build_builtin(spec: ModelSpec, builder: Builder, sizes: Mapping[str, Any]) -> nn.Module:
    for name in spec.args:
        if name in sizes:
            raise ModelError(
                f"model.args.{name} follows from the data (here {sizes[name]!r}).",
                hint="remove it from the job",
            )
    _check_arguments(spec, builder, taken=set(sizes))
    return _call(spec, builder, {**sizes, **spec.args})


def _build_own(spec: ModelSpec, sizes: Mapping[str, Any]) -> nn.Module:
    use_keras_on_torch()  # the user's file may import Keras
    imported = import_object(spec.name)
    if isinstance(imported, nn.Module):
        return as_module(imported, spec.name)
    if not callable(imported):
        raise ModelError(f"{spec.name} is a {type(imported).__name__}, not a class or function.")
    _check_arguments(spec, imported, taken=set())
    parameters = inspect.signature(imported).parameters
    named = {name: size for name, size in sizes.items() if name in parameters}
    return as_module(_call(spec, imported, {**named, **spec.args}), spec.name)


def _check_arguments(spec: ModelSpec, builder: Callable[..., Any], *, taken: set[str]) -> None:
    """Check names and types of the arguments, before the model is called."""
    parameters = inspect.signature(builder).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {
        name for name, p in parameters.items() if p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}
    }
    hints = _type_hints(builder)
    for name, value in spec.args.items():
        if name not in known and not open_ended:
            options = known - taken
            guess = nearest(name, options)
            raise ModelError(
                f"model.args.{name}: the model {spec.name!r} has no such argument.",
                hint=did_you_mean(name, options) if guess or options else "it takes no arguments",
            )
        if name in hints:
            _check_type(f"model.args.{name}", value, hints[name])


def _type_hints(builder: Callable[..., Any]) -> dict[str, Any]:
    target = builder.__init__ if inspect.isclass(builder) else builder
    try:
        return get_type_hints(target)
    except (NameError, TypeError, AttributeError):  # names imported for type checkers only
        return {}


def _check_type(key: str, value: Any, hint: Any) -> None:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUserError):  # a type JSON cannot carry
        return
    try:
        # JSON mode: accepts a list for a tuple, but not "3" for 3.
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        shown = getattr(hint, "__name__", str(hint)) if inspect.isclass(hint) else str(hint)
        raise ModelError(
            f"model.args.{key.removeprefix('model.args.')}: {value!r} is not of type {shown} ({reason}).",
        ) from error


def _call(spec: ModelSpec, builder: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return builder(**arguments)
    except YunluError:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelError(
            f"The model {spec.name!r} cannot be built: {type(error).__name__}: {error}",
            hint=f"it was called with {shown or 'no arguments'}",
        ) from error
