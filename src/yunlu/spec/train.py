"""``train`` of a job: length, optimiser, schedule, regularisation, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from yunlu.core.errors import did_you_mean
from yunlu.core.imports import OPTIMIZERS, known_names
from yunlu.core.value import Value
from yunlu.spec.fields import (
    Auto,
    Checked,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    Share,
    conflict,
    shorthand,
)
from yunlu.spec.optimizers import HYPERPARAMETERS, OptimizerName, traits_of

if TYPE_CHECKING:
    from yunlu.spec.optimizers import OptimizerTraits


class OptimizerSpec(Value):
    """How gradients become updates."""

    name: OptimizerName = "adamw"
    """The update rule: the name of an installed optimiser."""
    lr: Positive | Auto = "auto"
    """Peak learning rate; ``auto`` follows the optimiser and the model, with the reason in the plan."""
    weight_decay: NotNegative | Auto = "auto"
    """Decay of weights (not of biases and norms) by the rule of the optimiser, apart from ``train.l2``."""
    momentum: Fraction = 0.9
    """Share of the last update that is kept, where the optimiser has a momentum."""
    nesterov: bool = False
    """Look ahead along the momentum, where the optimiser has one."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the first and the second moment, where the optimiser has them."""
    eps: Positive = 1e-8
    """Keeps optimisers with a second moment from dividing by zero."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments that only this optimiser has; the built-in ones have none."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate follows the batch: ``linear`` for SGD, ``sqrt`` for Adam and its kin."""
    base_batch: Count = 32
    """The batch that ``lr`` is meant for; read where ``scaling`` is set."""
    state: Literal["fp32", "8bit"] = "fp32"
    """What the optimiser remembers of each weight: whole numbers, or a quarter of the memory."""
    kernel: Literal["auto", "fused", "foreach", "single"] = "auto"
    """How torch applies the update; ``auto`` takes the fastest."""

    @model_validator(mode="after")
    def _takes_own_defaults(self) -> Self:
        # Without a single name the package runs uninstalled: then nothing can be said.
        if self.model_fields_set.isdisjoint({"name", "args"}) or not known_names(OPTIMIZERS):
            return self
        declared = self.traits.hyperparameters
        own = declared.keys() - set(HYPERPARAMETERS)
        for key in self.args.keys() - own:
            hint = did_you_mean(key, own) if own else "it has none of its own"
            conflict("args", f"{self.name} has no argument {key!r}; {hint}")
        # Not among the fields set: another name brings its own defaults.
        unset = declared.keys() - own - self.model_fields_set
        vars(self).update({name: declared[name] for name in unset})
        return self

    @property
    def traits(self) -> OptimizerTraits:
        """What is known of the optimiser."""
        return traits_of(self.name)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The values of all hyper-parameters that the optimiser reads."""
        return {
            name: getattr(self, name) if name in HYPERPARAMETERS else self.args.get(name, default)
            for name, default in self.traits.hyperparameters.items()
        }


class ScheduleSpec(Value):
    """How the learning rate moves."""

    name: Literal["constant", "linear", "cosine", "wsd", "plateau"] = "cosine"
    """The shape after warm-up; ``wsd`` is warm-up, stable, decay."""
    warmup: NotNegative | Auto = "auto"
    """Steps of linear warm-up (1 or more), or a share of the run (below 1)."""
    final: Share = 0.0
    """Learning rate at the end, as a share of the peak."""
    decay: Annotated[float, Field(gt=0, le=1), Checked] = 0.2
    """WSD: the last share of the run, in which the rate falls."""
    factor: Annotated[float, Field(gt=0, lt=1), Checked] = 0.5
    """Plateau: the rate is multiplied by this."""
    patience: Count = 2
    """Plateau: after this many evaluations without a better metric."""


class ClipSpec(Value):
    """Bounds on the gradient; the norm is logged either way."""

    norm: Positive | Literal["adaptive"] | None = 1.0
    """Largest norm of the whole gradient; ``adaptive`` follows the norms of the steps before."""
    value: Positive | None = None
    """Largest absolute value of a component."""


class GrowBatchSpec(Value):
    """A batch that grows while the training goes on, instead of a rate that falls."""

    every: Count
    """Epochs after which the batch grows, again and again."""
    factor: Count = 2
    """The batch is multiplied by this."""
    limit: Count | None = None
    """The largest batch."""


class AdaptBatchSpec(Value):
    """A batch that follows the number of workers, as far as the gradient's noise makes it worth it."""

    max: Count
    """The largest batch."""
    min: Count | None = None
    """The smallest; ``train.batch`` when not set."""
    rate: Literal["none", "linear", "sqrt", "gain"] | Auto = "auto"
    """How the learning rate follows: ``auto`` is ``optimizer.scaling``, else ``gain`` for SGD and ``sqrt`` for Adam."""


class GuardSpec(Value):
    """What happens when a loss or gradient is not finite, or a loss jumps."""

    spikes: Positive | None = 10.0
    """A loss this many deviations above the recent ones is a bad step; null looks for none."""
    skips: CountOrZero = 3
    """Bad steps in a row that are left out before rolling back."""
    rollbacks: CountOrZero = 3
    """Times the run may go back to its last good checkpoint and on past the bad samples."""


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
    url: str | None = None
    """Where they are kept instead of the run's directory: an fsspec URL such as ``s3://bucket/runs``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of its file system, such as an endpoint; credentials are refused: they belong in the environment."""


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
    optimizer: Annotated[OptimizerSpec, shorthand(OptimizerSpec, "name")] = OptimizerSpec()
    """How gradients become updates: a name such as ``adamw``, or a mapping with its details."""
    schedule: Annotated[ScheduleSpec, shorthand(ScheduleSpec, "name")] = ScheduleSpec()
    """How the learning rate moves: a name such as ``cosine``, or a mapping with its details."""
    clip: Annotated[ClipSpec, shorthand(ClipSpec, "norm")] = ClipSpec()
    """Largest norm of the gradient, or a mapping with ``norm`` and ``value``."""
    grow_batch: Annotated[GrowBatchSpec, shorthand(GrowBatchSpec, "every")] | None = None
    """Epochs after which the batch doubles, or a mapping; constant when not set."""
    adapt_batch: Annotated[AdaptBatchSpec, shorthand(AdaptBatchSpec, "max")] | None = None
    """The largest batch that the run may turn to when it gets more workers, or a mapping; never when not set."""
    guard: GuardSpec = GuardSpec()
    """What happens to bad steps: skipped, then rolled back, then an error."""
    l1: NotNegative = 0.0
    """Weight of the sum of absolute weights in the objective."""
    l2: NotNegative = 0.0
    """Weight of half the sum of squared weights in the objective (coupled, unlike weight decay)."""
    label_smoothing: Fraction = 0.0
    """Classification: share of each target spread evenly over the labels."""
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights, used to evaluate and export."""
    early_stopping: (
        Annotated[EarlyStoppingSpec, shorthand(EarlyStoppingSpec, "patience")] | None
    ) = None
    """Evaluations without improvement before stopping, or a mapping; never when not set."""
    evaluate: Count | Literal["epoch", "never"] = "epoch"
    """Steps between evaluations on the validation data."""
    checkpoint: Annotated[CheckpointSpec, shorthand(CheckpointSpec, "every")] = CheckpointSpec()
    """Steps between checkpoints, ``epoch``, or a mapping that also says what is kept."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic of the forward and backward pass; ``auto`` takes what the device does fast."""
    adapt_precision: bool | Auto = "auto"
    """Move single modules to full precision while they need it; ``auto`` does so under fp16."""
    quantize: Literal["none", "int8"] = "none"
    """Train for INT8 weights: round in the forward pass as the deployed model will."""
    compile: bool | Literal["auto", "xla"] = "auto"
    """Compile the model (torch.compile), or hand it to XLA."""
    padding: Literal["auto", "pad", "bucket", "pack"] = "auto"
    """Samples of different length: padded, batched by length, or laid end to end."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations computed again in the backward pass instead of kept: memory for time."""
    memory_gb: Positive | Auto = "auto"
    """Memory that training may take; ``auto`` is a part of what is free."""
    gradient_release: bool = False
    """Update each weight as soon as its gradient is there, and free it: no accumulation, no clipping by norm."""
    trial_share: Fraction = 0.03
    """Share of the predicted time that measuring before the first step may take, two seconds at least; 0 tries no settings."""
    profile: bool = False
    """Trace a few steps: where their time goes."""
    threads: Count | Auto = "auto"
    """CPU threads that compute; ``auto`` measures once whether more than one is faster here."""
    workers: CountOrZero | Auto = "auto"
    """Processes that load data; 0 loads in the training process."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Checked] = 0
    """Decides the order of samples, the first weights and dropout."""
    deterministic: bool = True
    """Use algorithms whose result does not vary from run to run; warns where there is none."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            conflict("steps", "set either epochs or steps, not both")
        if self.l2 and self.optimizer.traits.decays_by == "weight_decay":
            conflict(
                "l2",
                f"l2 is coupled to the gradient and has no clear meaning under "
                f"{self.optimizer.name}; use optimizer.weight_decay",
            )
        micro, batch = self.micro_batch, self.batch
        if micro != "auto" and batch != "auto" and micro > batch:
            conflict("micro_batch", f"{micro} is above batch {batch}")
        if self.optimizer.state == "8bit" and not self.optimizer.traits.has_8bit_state:
            conflict("optimizer", f"{self.optimizer.name} has no state: 8bit")
        if self.optimizer.state == "8bit" and self.optimizer.kernel not in {"auto", "single"}:
            conflict("optimizer", f"state: 8bit has no {self.optimizer.kernel} kernel")
        if self.adapt_precision is True and self.precision in {"fp32", "tf32", "fp8"}:
            conflict("adapt_precision", f"there is nothing to adapt in {self.precision}")
        self._refuse_impossible_release()
        self._refuse_impossible_limits()
        if self.evaluate == "never" and self.early_stopping is not None:
            conflict("early_stopping", "needs evaluations, but evaluate is 'never'")
        if self.evaluate == "never" and self.schedule.name == "plateau":
            conflict("schedule", "'plateau' needs evaluations, but evaluate is 'never'")
        return self

    def _refuse_impossible_release(self) -> None:
        """A gradient that is freed at once cannot be added to, or measured with the others."""
        if not self.gradient_release:
            return
        if self.clip.norm is not None:
            conflict("gradient_release", "needs clip.norm: null: the whole gradient never exists")
        if self.micro_batch not in {"auto", self.batch}:
            conflict("gradient_release", "needs the whole batch in one pass: remove micro_batch")
        if self.grow_batch is not None:
            conflict("gradient_release", "needs the whole batch in one pass: remove grow_batch")
        if self.adapt_batch is not None:
            conflict("gradient_release", "needs the whole batch in one pass: remove adapt_batch")
        if self.precision in {"fp16", "fp8"}:
            conflict("gradient_release", f"cannot scale gradients, which {self.precision} needs")

    def _refuse_impossible_limits(self) -> None:
        limits, batch = self.adapt_batch, self.batch
        if limits is None:
            return
        if self.grow_batch is not None:
            conflict("adapt_batch", "a batch that adapts cannot also grow: remove grow_batch")
        if limits.min is not None and limits.min > limits.max:
            conflict("adapt_batch", f"min {limits.min} is above max {limits.max}")
        if batch != "auto" and not (limits.min or batch) <= batch <= limits.max:
            conflict("adapt_batch", f"batch {batch} lies outside of its limits")
