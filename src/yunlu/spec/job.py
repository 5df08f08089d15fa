"""Job: task, model, data, training goal. What is asked, never how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from yunlu.core.value import Value
from yunlu.spec.communication import CommunicationField, CommunicationSpec, spell_communication
from yunlu.spec.fields import Auto, Count, CountOrZero, Fraction, Positive, conflict, shorthand
from yunlu.spec.goal import GoalSpec
from yunlu.spec.layout import LayoutField, LayoutSpec, spell_layout
from yunlu.spec.search import SearchSpec
from yunlu.spec.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable


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
