"""Job: task, model, data, layout, goal. What is asked, never how."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value
from yunlu.spec.communication import CommunicationField, CommunicationSpec, spell_communication
from yunlu.spec.fields import (
    Auto,
    Count,
    CountOrZero,
    Deadline,
    Fraction,
    Names,
    Positive,
    conflict,
    shorthand,
)
from yunlu.spec.search import SearchSpec
from yunlu.spec.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable

SPLITTING = ("dp", "fsdp", "tp", "pp")
"""The axes whose product is the number of workers."""

_NO_CONTEXT_PARALLEL = (
    "context parallel is not available: torch has no sharding strategy for the attention kernels "
    "of a CPU, and on GPUs it is not built yet"
)


class LayoutSpec(Value):
    """How many ways each axis splits the work; what is not said is chosen."""

    dp: Count | Auto = "auto"
    """Replicas, each with the whole model and its own samples of a step."""
    fsdp: Count | Auto = "auto"
    """Ways in which weights, gradients and optimiser state are sharded; each shard has its own samples."""
    tp: Count | Auto = "auto"
    """Ways in which each weight matrix is cut."""
    pp: Count | Auto = "auto"
    """Stages in a row, each with some of the layers."""
    cp: Count = 1
    """Ways in which one sample's sequence is cut for attention; not available yet."""
    sequence: bool = False
    """With ``tp``: between the cut matrices, the sequence is cut too."""
    vocabulary: bool = False
    """With ``tp``: the loss is computed on the cut vocabulary."""
    zero1: bool = False
    """With ``dp``: replicas share out the optimiser's state."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved"] = "auto"
    """With ``pp``: the order in which a stage takes its micro-batches; ``auto`` is ``1f1b``."""
    stages_per_rank: Count | Auto = "auto"
    """With ``pp``: more than one only where the schedule is ``interleaved``, which takes 2."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that are said, with their sizes."""
        given = {axis: getattr(self, axis) for axis in SPLITTING}
        return {axis: size for axis, size in given.items() if size != "auto"}

    @property
    def said_workers(self) -> int:
        """The product of the axes that are said."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to choose: the layout itself says how many workers it has."""
        return len(self.sizes) == len(SPLITTING)

    def __str__(self) -> str:
        """As it could be written: ``dp2 x tp2``, ``single``, ``auto``."""
        axes = [f"{axis}{size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(axes) or ("single" if self.is_whole else "auto")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.cp > 1:
            conflict("cp", _NO_CONTEXT_PARALLEL)
        self._check_options_of_tp()
        self._check_options_of_pp()
        if self.zero1 and self.dp == 1:
            conflict("zero1", "shares the optimiser's state among replicas, but dp is 1")
        if self.zero1 and self.fsdp not in {"auto", 1}:
            conflict("zero1", "fsdp shards the optimiser's state already; remove one of them")
        return self

    def _check_options_of_tp(self) -> None:
        for key in ("sequence", "vocabulary"):
            if getattr(self, key) and self.tp in {"auto", 1}:
                conflict(key, "needs tp: say how many ways each matrix is cut, such as tp: 2")

    def _check_options_of_pp(self) -> None:
        stages, schedule = self.stages_per_rank, self.schedule
        is_piped = self.pp not in {"auto", 1}
        if schedule != "auto" and not is_piped:
            conflict("schedule", "needs pp: say how many stages there are, such as pp: 2")
        if stages not in {"auto", 1} and not is_piped:
            conflict(
                "stages_per_rank", "needs pp: say how many ranks stand in a row, such as pp: 2"
            )
        if stages == 1 and schedule == "interleaved":
            conflict("stages_per_rank", "the interleaved schedule needs 2 or more")
        if stages not in {"auto", 1} and schedule not in {"auto", "interleaved"}:
            conflict("stages_per_rank", f"{stages} needs the interleaved schedule, not {schedule}")


_WORD = r"(dp|fsdp|tp|pp|cp)[=:]?([1-9]\d{0,5})"
_TEXT = rf"^\s*(auto|single|{_WORD}(\s*[x×*, ]\s*{_WORD})*)\s*$"


def read_axes(text: str) -> dict[str, int] | None:
    """The axes of ``dp2 x tp2``; none of ``single``; None where the text is not a layout."""
    if text.strip() == "single":
        return {}
    sizes: dict[str, int] = {}
    for word in re.split(r"\s*[x×*,\s]\s*", text.strip()):
        match = re.fullmatch(_WORD, word)
        if match is None or match[1] in sizes:
            return None
        sizes[match[1]] = int(match[2])
    return sizes


def spell_layout(text: str) -> dict[str, Any] | None:
    """The mapping that a text stands for: it names the whole layout, so the other axes are 1."""
    if text.strip() == "auto":
        return {}
    sizes = read_axes(text)
    return None if sizes is None else {**dict.fromkeys(SPLITTING, 1), **sizes}


def _widen(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    spelt = spell_layout(value)
    if spelt is None:
        raise PydanticCustomError("not_a_layout", "expected a layout")
    return spelt


_LayoutText = Annotated[
    str,
    Field(
        pattern=_TEXT,
        json_schema_extra={"patternErrorMessage": "'auto', 'single', a layout such as 'dp2 x tp2'"},
    ),
]
LayoutField = Annotated[
    LayoutSpec, BeforeValidator(_widen, json_schema_input_type=_LayoutText | LayoutSpec)
]
"""A layout as text or as a mapping."""


Objective = Literal["cost", "time", "balanced"]


class GoalSpec(Value):
    """What ``yunlu plan`` chooses hardware and layout by."""

    objective: Objective = "balanced"
    """What to make small: ``cost``, ``time``, or both (``balanced``)."""
    budget: Positive | None = None
    """The most it may cost, in dollars."""
    deadline: Deadline | None = None
    """The longest it may take: ``90min``, ``36h``, ``2d``."""
    gpu: Names | None = None
    """Devices to choose from, such as ``H100``; all that the catalog has when not set."""
    cloud: Names | None = None
    """Clouds to choose from; all that the catalog has when not set, and this machine (``here``)."""
    region: Names | None = None
    """Regions to choose from."""
    spot: bool = False
    """Whether machines may be taken that the cloud can take back at any time, for less."""
    max_devices: Count | None = None
    """The most devices; 64 when not set, more where fewer cannot hold the model."""
    max_batch: Count | None = None
    """The largest batch where ``train.batch`` is ``auto``."""


class AdapterSpec(Value):
    """A few trained weights beside frozen ones."""

    name: Literal["lora"] = "lora"
    """Low-rank updates of matrices (Hu et al. 2021)."""
    rank: Count = 8
    """Rank of each update."""
    alpha: Positive = 16.0
    """The update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout on the input of each update."""
    targets: list[str] | Auto = "auto"
    """Names of the layers that get one, or their ends; ``auto`` takes every linear layer but the head."""


class ModelSpec(Value):
    """Which model, and with which arguments."""

    name: str = Field(min_length=1)
    """A built-in (``mlp``, ``cnn``, ``transformer``, ...), ``hf:DIRECTORY`` or ``hf:HUB_NAME@COMMIT``, a ``.keras`` file, or ``module:Class``."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the model, such as ``hidden: [64]`` or ``dropout: 0.1``."""
    pretrained: bool = True
    """For ``hf:`` models: load the weights (true) or only the configuration (false)."""
    weights: str | None = None
    """Start from the weights of this exported model: the ``model`` directory of an earlier run."""
    adapter: Annotated[AdapterSpec, shorthand(AdapterSpec, "name")] | None = None
    """Train an adapter (``lora``) instead of every weight."""


class SplitSpec(Value):
    """Shares held out when no validation or test data is named."""

    validation: Fraction = 0.1
    """Share of the training data held out to evaluate during training."""
    test: Fraction = 0.1
    """Share held out for the final evaluation."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.validation + self.test >= 1:
            conflict("test", "validation and test together leave nothing to train on")
        return self


class DataSpec(Value):
    """Where the samples are and which parts of them matter."""

    train: str = Field(min_length=1)
    """A file or folder (local path or fsspec URL), ``hf:NAME@COMMIT``, ``sklearn:NAME``, or ``synthetic:NAME`` for data Yunlu makes."""
    validation: str | None = None
    """Like ``train``; without it a share of the training data is held out."""
    test: str | None = None
    """Like ``train``; without it a share of the training data is held out."""
    format: Literal[
        "auto", "text", "csv", "tsv", "jsonl", "parquet", "numpy", "images", "wav", "hf"
    ] = "auto"
    """How to read it; ``auto`` goes by the name and the first bytes."""
    input: str | list[str] | None = None
    """Column(s) fed to the model; found by name and type when not set."""
    target: str | None = None
    """Column to predict; found by name when not set (``label``, ``target``, ``y``, ...)."""
    split: SplitSpec = SplitSpec()
    """Shares held out where no validation or test data is named."""
    limit: Count | None = None
    """Use at most this many samples of each part: quick trials."""
    samples: Count | None = None
    """For the plan: how many samples there are to train on, where counting them would take long."""
    tokens: Count | None = None
    """For the plan: how many tokens of text there are to train on, instead of ``samples``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the fsspec file system, such as an endpoint; credentials are refused: they belong in the environment."""
    max_length: Count | Auto = "auto"
    """Text and speech: longest sample, in tokens or seconds × 100; longer ones are cut."""
    tokenizer: str = "auto"
    """Text: ``bytes``, ``bpe`` (trained on the data), or a Hugging Face directory; ``auto`` follows the model."""
    vocabulary: Count | Auto = "auto"
    """Text: how many tokens a trained tokenizer may have."""
    image_size: Count | Auto = "auto"
    """Images: edge in pixels after resizing; ``auto`` keeps the size of the first image."""
    sample_rate: Count | Auto = "auto"
    """Speech: samples per second; ``auto`` keeps the rate of the first file."""


_Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$",
        json_schema_extra={
            "patternErrorMessage": "a name of up to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"
        },
    ),
]


class Job(Value):
    """One training job."""

    name: _Name | None = None
    """Names the runs; the file's name when not set."""
    task: str = Field(min_length=1)
    """A task by name (``yunlu schema`` lists them) or your own ``module:Class``."""
    model: Annotated[ModelSpec, shorthand(ModelSpec, "name")]
    """The model's name, or a mapping that also gives its arguments."""
    data: Annotated[DataSpec, shorthand(DataSpec, "train")]
    """Where the training data is, or a mapping with its parts and columns."""
    train: TrainSpec = TrainSpec()
    """How long to train, in what batches, with which optimiser."""
    devices: Count | Auto = "auto"
    """Workers, one for each device; ``auto`` is what the layout says, else all GPUs, else one."""
    spares: CountOrZero = 1
    """With several workers: how many more stand by, loaded and ready to take a lost one's place."""
    layout: LayoutField = LayoutSpec()
    """How the work is split over devices: ``auto``, ``single``, text such as ``dp2 x tp2``, or a mapping."""
    communication: CommunicationField = CommunicationSpec()
    """How replicas exchange what they learn: ``auto``, a guarantee (``near``), ``direct + int8``, or a mapping."""
    goal: GoalSpec = GoalSpec()
    """What training may cost and take, and on which hardware: what ``yunlu plan`` chooses by."""
    trackers: list[str] = Field(default_factory=list)
    """Besides TensorBoard: ``wandb``, ``mlflow``, or your own ``module:Class``."""
    callbacks: Names = Field(default_factory=list)
    """Called as the run trains: ``csv``, ``log``, or your own ``module:Class`` or ``path/file.py:Class``."""
    metrics: Names = Field(default_factory=list)
    """Your own metrics: functions ``module:function`` of the outputs and targets of an evaluation."""
    search: SearchSpec | None = None
    """Which fields ``yunlu tune`` varies, and how it finds good values; training alone does not read it."""

    @model_validator(mode="after")
    def _layout_fits_devices(self) -> Self:
        devices, layout = self.devices, self.layout
        if devices == "auto":
            return self
        given = layout.said_workers
        if layout.is_whole and given != devices:
            workers = "1 worker" if given == 1 else f"{given} workers"
            conflict("devices", f"is {devices}, but the layout {layout} has {workers}")
        if devices % given:
            conflict("devices", f"is {devices}, which {layout} does not divide")
        return self

    @model_validator(mode="after")
    def _base_width_fits_optimizer(self) -> Self:
        optimizer = self.train.optimizer
        is_based = self.model.name == "transformer" and "mup_base" in self.model.args
        if is_based and not optimizer.traits.has_mup:
            conflict("model", f"args.mup_base has no rules for {optimizer.name}; adamw has")
        return self


SHORTHANDS: dict[tuple[str, ...], str] = {
    ("model",): "name",
    ("data",): "train",
    ("train", "optimizer"): "name",
    ("train", "schedule"): "name",
    ("model", "adapter"): "name",
    ("train", "clip"): "norm",
    ("train", "grow_batch"): "every",
    ("train", "adapt_batch"): "max",
    ("train", "early_stopping"): "patience",
    ("train", "checkpoint"): "every",
    ("search", "stop"): "name",
}
"""Keys that also take a bare value, and the field it stands for (as ``shorthand`` reads them)."""

SPELLINGS: dict[tuple[str, ...], Callable[[str], dict[str, Any] | None]] = {
    ("layout",): spell_layout,
    ("communication",): spell_communication,
}
"""Keys that also take a text, and how the mapping is found that it stands for."""
