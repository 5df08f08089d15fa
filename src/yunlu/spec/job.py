"""What the user asks: task, model, data, training goal. Never how: that is the plan's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from yunlu.core.value import Value

Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


def _shorthand(key: str) -> BeforeValidator:
    """A bare string (or number) stands for the one field that most people set."""

    def widen(value: Any) -> Any:
        return {key: value} if isinstance(value, (str, int, float)) else value

    return BeforeValidator(widen, json_schema_input_type=Any)


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
    lr: Positive | Auto = "auto"
    """Peak learning rate; ``auto`` follows the optimiser and the model, with the reason in the plan."""
    weight_decay: NotNegative | Auto = "auto"
    """Decoupled decay of weights (not of biases and norms): AdamW, LAMB, LARS."""
    momentum: Fraction = 0.9
    """SGD with momentum and LARS."""
    nesterov: bool = False
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam, AdamW and LAMB."""
    eps: Positive = 1e-8


class ScheduleSpec(Value):
    """How the learning rate moves."""

    name: Literal["constant", "linear", "cosine", "wsd", "plateau"] = "cosine"
    warmup: NotNegative | Auto = "auto"
    """Steps of linear warm-up (1 or more), or a share of the run (below 1)."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end, as a share of the peak."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """WSD: the last share of the run, in which the rate falls."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
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
    """Steps between checkpoints; ``auto`` weighs lost work against the time a save takes."""
    keep_last: Count = 2
    keep_best: Annotated[int, Field(ge=0)] = 1
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
    optimizer: Annotated[OptimizerSpec, _shorthand("name")] = OptimizerSpec()
    schedule: Annotated[ScheduleSpec, _shorthand("name")] = ScheduleSpec()
    clip: Annotated[ClipSpec, _shorthand("norm")] = ClipSpec()
    l1: NotNegative = 0.0
    """Weight of the sum of absolute weights in the objective."""
    l2: NotNegative = 0.0
    """Weight of half the sum of squared weights in the objective (coupled, unlike weight decay)."""
    label_smoothing: Fraction = 0.0
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights, used to evaluate and export."""
    early_stopping: Annotated[EarlyStoppingSpec, _shorthand("patience")] | None = None
    evaluate: Count | Literal["epoch", "never"] = "epoch"
    """Steps between evaluations on the validation data."""
    checkpoint: Annotated[CheckpointSpec, _shorthand("every")] = CheckpointSpec()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool | Auto = "auto"
    """Compile the model (torch.compile)."""
    workers: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Processes that load data; 0 loads in the training process."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    deterministic: bool = True
    """Refuse algorithms whose result varies from run to run."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("set either epochs or steps, not both")
        if self.l2 and self.optimizer.name in {"adamw", "lamb"}:
            raise ValueError(
                f"l2 is coupled to the gradient and has no clear meaning under "
                f"{self.optimizer.name}; use optimizer.weight_decay"
            )
        if isinstance(self.micro_batch, int) and isinstance(self.batch, int):
            if self.micro_batch > self.batch:
                raise ValueError(f"micro_batch {self.micro_batch} is above batch {self.batch}")
        return self


class Job(Value):
    """One training job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] | None = None
    """Names the runs; the file's name when not set."""
    task: str = Field(min_length=1)
    """A task by name (``yunlu schema`` lists them) or your own ``module:Class``."""
    model: Annotated[ModelSpec, _shorthand("name")]
    data: Annotated[DataSpec, _shorthand("train")]
    train: TrainSpec = TrainSpec()
    layout: Literal["auto", "single"] = "auto"
    """How the work is split over devices."""
    trackers: list[str] = Field(default_factory=list)
    """Besides TensorBoard: ``wandb``, ``mlflow``, or your own ``module:Class``."""
