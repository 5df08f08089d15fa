"""Model compilation: torch.compile (Inductor), or XLA where its package fits the installed torch."""

from __future__ import annotations

import math
import shutil
import sysconfig
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from yunlu.core.errors import ModelError, TrainingError
from yunlu.training.determinism import set_deterministic
from yunlu.training.device import is_accelerator, kind_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

Backend = Literal["inductor", "xla"]

# Fitted to the processor seconds of five models of 8 to 75 layers, compiled for the first time on a
# slow CPU: 13 to 84 s, error up to 8 s. A root, since layers of one shape share compiled code.
_ROOT_S = 11.6
_OFFSET_S = -12.0
_LEAST_S = 10.0


def compiler_problem(backend: Backend, device: torch.device | None = None) -> str | None:
    """Why this machine cannot compile; None if it can. The device is the CPU unless given."""
    if backend == "xla":
        return _xla_problem()
    from torch._dynamo.eval_frame import is_dynamo_supported  # noqa: PLC0415 - slow to import

    if not is_dynamo_supported():
        return "torch.compile does not run on this Python and system."
    if device is not None and is_accelerator(device):
        return kind_of(device.type).compiler_problem()
    return _cpp_problem()


def compile_model(model: nn.Module, backend: Backend, device: torch.device) -> None:
    """Compile in place: the names of the weights stay as they are.

    Compilation happens at the first call. A second batch length compiles for dynamic lengths,
    so that data of varying length does not recompile for ever. For XLA the model moves to its device.
    """
    problem = compiler_problem(backend, device)
    if problem is not None:
        raise TrainingError(problem, hint="Set train.compile: false.")
    if backend == "xla":
        model.to(xla_device())
        return
    set_deterministic(
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    compiled = torch.compile(model._call_impl, dynamic=None)  # pyright: ignore[reportPrivateUsage]

    def call(*args: Any, **kwargs: Any) -> Any:
        with explain_compile_errors():
            return compiled(*args, **kwargs)

    # As nn.Module.compile, with our error messages; copies and pickles leave it out.
    model._compiled_call_impl = call  # pyright: ignore[reportPrivateUsage]


def compiled_call(model: nn.Module) -> Any:
    """The compiled call of the model; None if it is not compiled."""
    return model._compiled_call_impl  # pyright: ignore[reportPrivateUsage]


def set_compiled_call(model: nn.Module, call: Any) -> None:
    """Put aside what was compiled (none), or take it up again: nothing is compiled anew."""
    model._compiled_call_impl = call  # pyright: ignore[reportPrivateUsage]


@contextmanager
def explain_compile_errors() -> Generator[None]:
    """Say what to do where the compiler fails; around a backward pass too, which compiles late."""
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - slow to import

    try:
        yield
    except TorchDynamoException as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelError(
            f"The model cannot be compiled: {type(error).__name__}: {first.strip()}",
            hint="Set train.compile: false.",
        ) from error


def xla_device() -> torch.device:
    """The device that XLA compiles for; weights and batches must be on it.

    Call before the first backward pass of the process: torch counts its devices only once.
    """
    problem = compiler_problem("xla")
    if problem is not None:
        raise TrainingError(problem, hint="Set train.compile: false.")
    import torch_xla  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    return torch_xla.device()


def run_xla_steps(optimizer: torch.optim.Optimizer) -> None:
    """Compile and run the recorded graph after each optimiser step: XLA is lazy."""
    import torch_xla  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    def run(*_: Any) -> None:
        torch_xla.sync()

    optimizer.register_step_post_hook(run)


def estimate_compile_s(model: nn.Module) -> float:
    """Estimated seconds that Inductor takes for the first step, from the number of layers.

    Far less for a model in torch's cache; more on busy cores.
    """
    layers = sum(1 for module in model.modules() if not any(True for _ in module.children()))
    return max(_LEAST_S, _ROOT_S * math.sqrt(layers) + _OFFSET_S)


def _cpp_problem() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - slow to import
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    if shutil.which(compiler) is None:
        return "torch.compile needs a C++ compiler on the CPU, and there is none (g++ or clang++)."
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        return f"torch.compile needs the headers of Python, and there is no {headers}."
    return None


def _xla_problem() -> str | None:
    try:
        version = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        return (
            "train.compile=xla needs the package torch_xla of the same version as torch "
            f"({_series(torch.__version__)}), and it is not installed."
        )
    if _series(version) != _series(torch.__version__):
        return (
            f"train.compile=xla: torch_xla {version} is built for torch {_series(version)}, "
            f"and this is torch {torch.__version__}; the two must have the same version."
        )
    return None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
