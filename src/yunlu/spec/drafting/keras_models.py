"""Keras models that a script builds: an ``mlp`` where it has dense layers only, else the user's function."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from yunlu.spec.drafting.script import ScriptCall, UnknownValueError

if TYPE_CHECKING:
    from yunlu.spec.drafting.draft import Draft
    from yunlu.spec.drafting.script import Script

_DENSE = {
    "Dense",
    "Dropout",
    "Flatten",
    "Input",
    "InputLayer",
    "Rescaling",
    "Normalization",
    "Activation",
}
_ACTIVATIONS = {"relu", "gelu", "silu", "tanh"}


def draft_keras_model(script: Script, draft: Draft) -> None:
    """The model, if it is not named otherwise."""
    layers = [
        call
        for call in script.calls
        if ".layers." in call.name or call.last in {"Dense", "Dropout", "Flatten"}
    ]
    if "model.name" in draft.values or not layers:
        return
    kinds = {call.last for call in layers}
    if kinds <= _DENSE and "Dense" in kinds:
        _draft_mlp(script, layers, draft)
        return
    for name, function in script.functions.items():
        if _builds_a_model(script, function):
            draft.take("model.name", f"{draft.source}:{name}")
            draft.note(
                f"{draft.source} is imported for {name}: keep what trains below if __name__ == '__main__', and "
                "set KERAS_BACKEND=torch"
            )
            return
    others = ", ".join(sorted(kinds - _DENSE))
    draft.leave(f"the model ({others})", "put it into a function without arguments and name it module:function, "
                "or save it: model.save('model.keras')", layers[0].line)  # fmt: skip


def _draft_mlp(script: Script, layers: list[ScriptCall], draft: Draft) -> None:
    dense = [call for call in layers if call.last == "Dense"]
    sizes = [_argument(script, call, "units", 0) for call in dense[:-1]]
    if not all(isinstance(size, int) for size in sizes) or not sizes:
        draft.leave(
            "the sizes of the Dense layers",
            "only running the script would tell them",
            dense[0].line,
        )
        return
    draft.take("model.name", "mlp")
    draft.take("model.args.hidden", sizes)
    dropped = {_argument(script, call, "rate", 0) for call in layers if call.last == "Dropout"} - {
        None
    }
    if dropped:
        draft.take("model.args.dropout", max(dropped))
    activations = {_argument(script, call, "activation", 1) for call in dense[:-1]} - {None}
    if (
        len(activations) == 1
        and (chosen := str(activations.pop())) in _ACTIVATIONS
        and chosen != "relu"
    ):
        draft.take("model.args.activation", chosen)
    draft.leave(
        "the last Dense layer", "the outputs follow from the labels in the data", dense[-1].line
    )


def _argument(script: Script, call: ScriptCall, name: str, position: int) -> Any:
    node = call.keywords.get(name) or (
        call.positional[position] if len(call.positional) > position else None
    )
    try:
        return script.value(node)
    except UnknownValueError:
        return None


def _builds_a_model(script: Script, function: ast.FunctionDef) -> bool:
    required = len(function.args.args) - len(function.args.defaults)
    return required == 0 and any(
        isinstance(node, ast.Call)
        and (script.full_name(node.func) or "").rpartition(".")[2] in {"Sequential", "Model"}
        for node in ast.walk(function)
    )
