"""Optimisers by entry point: traits that every room reads without torch, and a builder for the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from yunlu.core.errors import JobError
from yunlu.core.imports import OPTIMIZERS, known_names, load_registered

if TYPE_CHECKING:
    from collections.abc import Mapping

Kernel = Literal["fused", "foreach", "single"]
HYPERPARAMETERS = ("momentum", "nesterov", "betas", "eps")
"""Fields of ``train.optimizer`` that optimisers share; what else one declares is a key of its ``args``."""


class _InstalledNames:
    """JSON Schema of an optimiser's name: those that are installed here."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        names = known_names(OPTIMIZERS)
        return {**handler(core), **({"enum": list(names)} if names else {})}


def _check_name(name: str) -> str:
    known = known_names(OPTIMIZERS)
    if known and name not in known:  # without a single name the package runs uninstalled
        raise PydanticCustomError(
            "unknown_optimizer", "no installed package offers the optimiser {name}", {"name": name}
        )
    return name


OptimizerName = Annotated[str, AfterValidator(_check_name), _InstalledNames()]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """What a builder is given beside the weights: every value is decided."""

    lr: float
    hyperparameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that the traits declare, and no others."""
    state: Literal["fp32", "8bit"] = "fp32"
    kernel: Kernel = "single"
    """One of the declared kernels."""
    is_freezable: bool = False
    """Whether gradients may become so coarse that ``freeze`` and ``thaw`` are needed."""

    @property
    def torch_kernel(self) -> dict[str, Any]:
        """The kernel as arguments of torch's own optimisers."""
        return {"fused": self.kernel == "fused", "foreach": self.kernel == "foreach"}


class OptimizerBuilder(Protocol):
    """Builds an optimiser with the interface of torch's; imports torch when it is called."""

    def __call__(self, groups: list[dict[str, Any]], settings: OptimizerSettings, /) -> Any:
        """The optimiser over these groups: ``params``, and the ``weight_decay`` of each group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """What Yunlu must know of an optimiser to plan, check and build it."""

    build: OptimizerBuilder
    state_bytes: float
    """Bytes of state per trained weight, in fp32."""
    lr: float
    """Peak learning rate that trains most models from scratch."""
    fine_tuning_lr: float | None = None
    """The same for pretrained weights, which move less; ``lr`` where not given."""
    weight_decay: float = 0.0
    """Weight decay where the job leaves it open."""
    decays_by: Literal["l2", "weight_decay"]
    """Key of the job that ``weight_decay`` of a group is taken from: ``train.l2``, a penalty that is part
    of the gradient, or ``train.optimizer.weight_decay``, which the update rule applies in its own way."""
    scaling: Literal["linear", "sqrt"]
    """How the best learning rate grows with the batch."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that it reads, with its defaults: any of ``HYPERPARAMETERS``, and keys of ``args`` of its own."""
    kernels: tuple[Kernel, ...] = ("single",)
    """Kernels that its builder takes, the likely fastest first."""
    needs_whole_weights: bool = False
    """Whether an update depends on the whole weight, such as on its norm: then no weight can be cut."""
    has_8bit_state: bool = False
    can_freeze: bool = False
    """Whether it can freeze its second moment (``freeze``, ``thaw``), as gradients of one bit need."""
    has_mup: bool = False
    """Whether µP's rules for Adam hold, so that the rate carries over between widths."""
    has_rate_laws: bool = False
    """Whether the published laws of rate and batch, found with AdamW, hold."""

    def __post_init__(self) -> None:
        """Refuse traits with which nothing could be planned or built."""
        if not (self.state_bytes >= 0 and self.lr > 0 and self.weight_decay >= 0):
            raise ValueError("state_bytes, lr and weight_decay must be numbers of at least 0")
        if "single" not in self.kernels:
            raise ValueError("kernels must contain 'single', which every device has")


@cache
def traits_of(name: str) -> OptimizerTraits:
    """The traits of an optimiser; only the package that offers it is imported."""
    try:
        traits = load_registered(OPTIMIZERS, name, kind="optimiser")
    except (ImportError, AttributeError) as error:
        raise JobError(f"The optimiser {name!r} cannot be loaded: {error}.") from error
    if not isinstance(traits, OptimizerTraits):
        raise JobError(
            f"The optimiser {name!r} cannot be used: its entry point is no OptimizerTraits.",
            hint="yunlu.testing.optimizers holds the contract test of optimisers",
        )
    return traits
