"""What the user asks: task, model, data, training goal. Never how: that is the plan's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, Self, get_args

from pydantic import BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value


def _not_a_switch(value: Any) -> Any:
    """``batch: true`` is a slip, not a batch of one."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_switch", "expected a number")
    return value


# The check on switches comes last, so that the bounds stay part of the number's own schema.
_Checked = BeforeValidator(_not_a_switch)

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _Checked]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _Checked]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _Checked]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _Checked]
Count = Annotated[int, Field(gt=0), _Checked]
CountOrZero = Annotated[int, Field(ge=0), _Checked]


def _shorthand(spec: type[Value], key: str) -> BeforeValidator:
    """A bare string or number (or null, where it means "none") stands for the field most people set."""
    field = spec.model_fields[key]
    bare: Any = field.annotation
    nullable = type(None) in get_args(bare)
    for rule in field.metadata:
        bare = Annotated[bare, rule]

    def widen(value: Any) -> Any:
        is_bare = isinstance(value, (str, int, float)) or (value is None and nullable)
        return {key: value} if is_bare else value

    # Editors read the schema: both forms must stand in it.
    return BeforeValidator(widen, json_schema_input_type=bare | spec)


def _conflict(key: str, message: str) -> NoReturn:
    """Refuse two fields that contradict each other, pointing at one of them."""
    raise PydanticCustomError("conflict", "{message}", {"key": key, "message": message})


class ModelSpec(Value):
    """Which model, and with which arguments."""

    name: str = Field(min_length=1)
    """A built-in (``mlp``, ``cnn``, ``transformer``, ...), ``hf:DIRECTORY_OR_HUB_NAME``, a ``.keras`` file, or ``module:Class``."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the model, such as ``hidden: [64]`` or ``dropout: 0.1``."""
    pretrained: bool = True
    """For ``hf:`` models: load the weights (true) or only the configuration (false)."""


class SplitSpec(Value):
    """Shares held out when no validation or test data is named."""

    validation: Fraction = 0.1
    """Share of the training data held out to evaluate during training."""
    test: Fraction = 0.1
    """Share held out for the final evaluation."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.validation + self.test >= 1:
            _conflict("test", "validation and test together leave nothing to train on")
        return self


class DataSpec(Value):
    """Where the samples are and which parts of them matter."""

    train: str = Field(min_length=1)
    """A file or folder (local path or fsspec URL), ``hf:NAME``, ``sklearn:NAME``, or ``made:NAME`` for data Yunlu makes."""
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
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the fsspec file system, such as an endpoint; credentials belong in the environment."""
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


class OptimizerSpec(Value):
    """How gradients become updates."""

    name: Literal["sgd", "momentum", "adam", "adamw", "lamb", "lars"] = "adamw"
    """The update rule."""
    lr: Positive | Auto = "auto"
    """Peak learning rate; ``auto`` follows the optimiser and the model, with the reason in the plan."""
    weight_decay: NotNegative | Auto = "auto"
    """Decoupled decay of weights (not of biases and norms): AdamW, LAMB, LARS."""
    momentum: Fraction = 0.9
    """SGD with momentum and LARS."""
    nesterov: bool = False
    """Look ahead along the momentum: SGD with momentum."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam, AdamW and LAMB."""
    eps: Positive = 1e-8
    """Keeps Adam, AdamW and LAMB from dividing by zero."""


class ScheduleSpec(Value):
    """How the learning rate moves."""

    name: Literal["constant", "linear", "cosine", "wsd", "plateau"] = "cosine"
    """The shape after warm-up; ``wsd`` is warm-up, stable, decay."""
    warmup: NotNegative | Auto = "auto"
    """Steps of linear warm-up (1 or more), or a share of the run (below 1)."""
    final: Share = 0.0
    """Learning rate at the end, as a share of the peak."""
    decay: Annotated[float, Field(gt=0, le=1), _Checked] = 0.2
    """WSD: the last share of the run, in which the rate falls."""
    factor: Annotated[float, Field(gt=0, lt=1), _Checked] = 0.5
    """Plateau: the rate is multiplied by this."""
    patience: Count = 2
    """Plateau: after this many evaluations without a better metric."""


class ClipSpec(Value):
    """Bounds on the gradient; the norm is logged either way."""

    norm: Positive | None = 1.0
    """Largest norm of the whole gradient."""
    value: Positive | None = None
    """Largest absolute value of a component."""


class EarlyStoppingSpec(Value):
    """Stop when the validation metric no longer improves."""

    patience: Count = 5
    """Evaluations without improvement before stopping."""
    min_delta: NotNegative = 0.0
    """A smaller change does not count as improvement."""
    metric: str = "auto"
    """``loss`` or a metric of the task; ``auto`` is the task's own."""


class CheckpointSpec(Value):
    """What is kept, and how often."""

    every: Count | Literal["auto", "epoch"] = "auto"
    """Steps between checkpoints; ``auto`` loses at most about a minute of work."""
    keep_last: Count = 2
    """How many of the newest are kept."""
    keep_best: CountOrZero = 1
    """How many of the best are kept besides the last."""
    metric: str = "auto"
    """What "best" means: ``loss`` or a metric of the task; ``auto`` is the task's own."""


class TrainSpec(Value):
    """The training goal and the rules of the optimisation."""

    epochs: Positive | None = None
    """Passes over the data; 10 when neither this nor ``steps`` is set."""
    steps: Count | None = None
    """Optimiser steps, instead of ``epochs``."""
    batch: Count | Auto = "auto"
    """Global batch: samples per optimiser step, whatever the devices."""
    micro_batch: Count | Auto = "auto"
    """Samples per forward pass; the rest of the batch is accumulated."""
    optimizer: Annotated[OptimizerSpec, _shorthand(OptimizerSpec, "name")] = OptimizerSpec()
    """How gradients become updates: a name such as ``adamw``, or a mapping with its details."""
    schedule: Annotated[ScheduleSpec, _shorthand(ScheduleSpec, "name")] = ScheduleSpec()
    """How the learning rate moves: a name such as ``cosine``, or a mapping with its details."""
    clip: Annotated[ClipSpec, _shorthand(ClipSpec, "norm")] = ClipSpec()
    """Largest norm of the gradient, or a mapping with ``norm`` and ``value``."""
    l1: NotNegative = 0.0
    """Weight of the sum of absolute weights in the objective."""
    l2: NotNegative = 0.0
    """Weight of half the sum of squared weights in the objective (coupled, unlike weight decay)."""
    label_smoothing: Fraction = 0.0
    """Classification: share of each target spread evenly over the labels."""
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights, used to evaluate and export."""
    early_stopping: (
        Annotated[EarlyStoppingSpec, _shorthand(EarlyStoppingSpec, "patience")] | None
    ) = None
    """Evaluations without improvement before stopping, or a mapping; never when not set."""
    evaluate: Count | Literal["epoch", "never"] = "epoch"
    """Steps between evaluations on the validation data."""
    checkpoint: Annotated[CheckpointSpec, _shorthand(CheckpointSpec, "every")] = CheckpointSpec()
    """Steps between checkpoints, ``epoch``, or a mapping that also says what is kept."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass; ``auto`` takes what the device does fast."""
    compile: bool | Auto = "auto"
    """Compile the model (torch.compile)."""
    threads: Count | Auto = "auto"
    """CPU threads that compute; ``auto`` measures once whether more than one is faster here."""
    workers: CountOrZero | Auto = "auto"
    """Processes that load data; 0 loads in the training process."""
    seed: Annotated[int, Field(ge=0, lt=2**32), _Checked] = 0
    """Decides the order of samples, the first weights and dropout."""
    deterministic: bool = True
    """Use algorithms whose result does not vary from run to run; warns where there is none."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            _conflict("steps", "set either epochs or steps, not both")
        if self.l2 and self.optimizer.name in {"adamw", "lamb"}:
            _conflict(
                "l2",
                f"l2 is coupled to the gradient and has no clear meaning under "
                f"{self.optimizer.name}; use optimizer.weight_decay",
            )
        micro, batch = self.micro_batch, self.batch
        if micro != "auto" and batch != "auto" and micro > batch:
            _conflict("micro_batch", f"{micro} is above batch {batch}")
        if self.evaluate == "never" and self.early_stopping is not None:
            _conflict("early_stopping", "needs evaluations, but evaluate is 'never'")
        if self.evaluate == "never" and self.schedule.name == "plateau":
            _conflict("schedule", "'plateau' needs evaluations, but evaluate is 'never'")
        return self


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
    model: Annotated[ModelSpec, _shorthand(ModelSpec, "name")]
    """The model's name, or a mapping that also gives its arguments."""
    data: Annotated[DataSpec, _shorthand(DataSpec, "train")]
    """Where the training data is, or a mapping with its parts and columns."""
    train: TrainSpec = TrainSpec()
    """How long to train, in what batches, with which optimiser."""
    layout: Literal["auto", "single"] = "auto"
    """How the work is split over devices."""
    trackers: list[str] = Field(default_factory=list)
    """Besides TensorBoard: ``wandb``, ``mlflow``, or your own ``module:Class``."""


SHORTHANDS: dict[tuple[str, ...], str] = {
    ("model",): "name",
    ("data",): "train",
    ("train", "optimizer"): "name",
    ("train", "schedule"): "name",
    ("train", "clip"): "norm",
    ("train", "early_stopping"): "patience",
    ("train", "checkpoint"): "every",
}
"""Keys that also take a bare value, and the field it stands for (as ``_shorthand`` reads them)."""
