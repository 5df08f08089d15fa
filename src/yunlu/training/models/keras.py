"""Keras 3 models on the torch backend."""

from __future__ import annotations

import sys
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from yunlu.core.errors import ModelError, missing_part
from yunlu.core.limits import check_archive, read_limits
from yunlu.core.settings import use_keras_on_torch

if TYPE_CHECKING:
    from yunlu.spec.job import ModelSpec


class KerasModule(nn.Module):
    """A Keras model with torch's ``train()`` and ``eval()``, and stable weight names.

    Keras ignores both, and numbers its names per process, so that another process could not load them.
    """

    def __init__(self, keras_model: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                f"{index:04d}/{variable.name}": variable.value
                for index, variable in enumerate(keras_model.variables)
            }
        )
        # Bypass nn.Module's registration: the weights are registered above.
        object.__setattr__(self, "keras_model", keras_model)

    def forward(self, *inputs: Any) -> Any:
        """Call the Keras model; a model of one input gets the first."""
        model: Any = self.keras_model
        count = len(getattr(model, "inputs", None) or inputs)
        arguments = inputs[0] if count == 1 else list(inputs[:count])
        return model(arguments, training=self.training)

    def save(self, path: Path) -> None:
        """Save as Keras does: architecture and weights."""
        model: Any = self.keras_model
        with warnings.catch_warnings():
            # Keras hands torch's weights to NumPy in a way that NumPy 2 warns of.
            warnings.simplefilter("ignore", DeprecationWarning)
            model.save(path)


def load_keras(spec: ModelSpec) -> nn.Module:
    """Load a ``.keras`` file; layers with code are refused."""
    path = Path(spec.name).expanduser()
    if not path.is_file():
        raise ModelError(f"There is no Keras file {path.absolute()}.")
    if not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is not a valid .keras file: it is not a zip archive.")
    if spec.args:
        raise ModelError(
            f"{spec.name}: a .keras file is a finished model and takes no arguments.",
            hint="remove model.args",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, str(path), read_limits(), kind=ModelError)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{path} is not a valid .keras file: {error}") from error
    use_keras_on_torch()
    try:
        import keras  # noqa: PLC0415 - seconds to import, and optional
    except ImportError as error:
        raise missing_part("keras", "keras", f"The model {spec.name}") from error
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        if "Lambda" in str(error):
            raise ModelError(
                f"{path} holds a Lambda layer: Python code, which is never run from a file.",
                hint="write the model as your own module:Class instead",
            ) from error
        raise ModelError(f"{path} cannot be loaded: {_first_line(error)}") from error
    return as_module(model, spec.name)


def as_module(model: Any, name: str) -> nn.Module:
    """Check that a model can be trained; wrap a Keras model."""
    keras: Any = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        if keras.config.backend() != "torch":
            raise ModelError(
                f"{name} runs on Keras's {keras.config.backend()} backend; Yunlu trains on torch.",
                hint="set KERAS_BACKEND=torch before anything imports Keras",
            )
        if not model.built:
            raise ModelError(
                f"{name}: the Keras model has no weights yet.",
                hint="begin it with keras.Input(shape=...), or call model.build(...)",
            )
        return KerasModule(model)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name} gave a {type(model).__name__}; a torch.nn.Module was expected.",
        )
    return model


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
