"""Plan: decisions for one run, their reasons, and the prediction."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from yunlu.core.value import Value
from yunlu.hardware.links import Link
from yunlu.planning.layout import Layout, parse_layout
from yunlu.planning.split_constraints import SplitConstraints

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Compiler = Literal["none", "inductor", "xla"]
Kernel = Literal["fused", "foreach", "single"]
Padding = Literal["pad", "bucket", "pack"]
Recompute = Literal["none", "selective", "full"]


def _read_layout(value: Any) -> Any:
    """Plans that were written as ``single`` are still read."""
    return (parse_layout(value) or value) if isinstance(value, str) else value


class StepSettings(Value):
    """How a step is computed: what start-up may vary without changing the objective."""

    threads: int
    """CPU threads for compute."""
    micro_batch: int
    """Samples per forward pass."""
    precision: PrecisionName = "fp32"
    kernel: Kernel = "single"
    """How the optimiser applies its update."""
    padding: Padding = "pad"
    """Handling of samples of different length."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of the blocks, from the first on."""
    compile: Compiler = "none"


class AutotuneTrial(Value):
    """One setting tried before the first step, and its baseline."""

    name: str
    """Name of the setting: ``precision``, ``micro-batch``, ..."""
    value: str
    sample_s: float
    """Seconds per sample with it; for a kernel, seconds per update."""
    speedup: float
    """Relative to the settings before it; above 1 is faster."""
    is_adopted: bool
    remembered: bool = False
    """Measured by an earlier run of the same shape."""


class Profile(Value):
    """Measurements of a model and its data, as plain numbers."""

    parameters: int
    trainable: int
    activation_bytes_per_sample: float
    probe_samples: int
    """Samples in the measured micro-batch."""
    probe_s: float
    """Seconds of one forward and backward of it."""
    update_s: float
    """Seconds of one optimiser step."""
    own_s: float = 0.0
    """Engine overhead per step: gradient norm, loss, log."""
    load_s_per_sample: float
    """Seconds to fetch and collate one sample."""
    evaluate_s_per_sample: float
    train_samples: int
    validation_samples: int
    test_samples: int
    startup_s: float
    """From the start of the worker to the first step."""
    resident_bytes: int
    """Memory of the process before training."""
    peak_bytes: float | None = None
    """Most memory of the process after some passes, without an optimiser: known on a CPU."""
    settings: StepSettings
    """What the figures above were measured with."""
    reasons: dict[str, str]
    """Reason of each setting, by its name."""
    trials: tuple[AutotuneTrial, ...] = ()
    """Settings that were tried."""
    trial_s: float = 0.0
    """Duration of the trials."""
    task_metric: str
    """Headline metric of the task."""
    metrics: tuple[str, ...]
    """Every metric of an evaluation."""
    facts: SplitConstraints | None = None
    """How the model can be split; None where unknown, and then only replicas are possible."""
    link: Link | None = None
    """Measured link between two workers of this machine."""


class Choice(Value):
    """One decision, with its reason."""

    name: str
    value: str
    reason: str
    pinned: bool = False
    """Set by the user rather than chosen."""


class Prediction(Value):
    """Predicted memory, time and cost of a plan."""

    basis: Literal["analytic", "measured"] = "measured"
    """Counted operators, or passes timed at start-up."""
    memory_bytes: float
    """Of one worker."""
    step_s: float
    samples_per_s: float
    total_s: float
    """From the start of the worker to the finished model."""
    dollars: float | None
    """None where the machine has no price."""


class AnalyticPrediction(Prediction):
    """Prediction before any pass is timed: from counted operators and the machine's profile."""

    basis: Literal["analytic", "measured"] = "analytic"
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """10 to 90 % interval of some quantities."""
    raw: dict[str, float] = Field(default_factory=dict)
    """Before corrections by earlier runs: the next calibration compares with this."""
    version: int = 1
    """Version of the formulas: corrections for another version are invalid."""
    device: str
    stack: str
    work: str
    """Key of model, batch and data in calibration, together with device, stack and precision."""
    runs: int = 0
    """Number of earlier runs on this device that corrected the figures."""
    busy: float = 1.0
    """Assumed slowdown by other processes on the machine."""


class Measurement(Prediction):
    """Memory, time and cost of a run as measured."""


class Plan(StepSettings):
    """Everything the worker needs to know beyond the job."""

    device: Literal["cpu", "cuda", "mps"]
    devices: int = 1
    """Requested workers; a layout may use fewer."""
    layout: Annotated[Layout, BeforeValidator(_read_layout)] = Layout()
    """Split of the work; ``micro_batch`` and ``accumulation`` are per replica."""
    alone: StepSettings | None = None
    """Settings measured on one worker: other layouts are derived from them."""
    facts: SplitConstraints | None = None
    """How the model can be split, without axes that the job excludes: needed for a resize."""
    room_bytes: float = 0.0
    """Memory that all workers of a CPU together, or the one of a GPU, may use."""
    process_bytes: float = 0.0
    """Memory of a worker besides model, optimiser and activations."""
    adapt_precision: bool = False
    """Modules that overflow are moved to full precision during the run."""
    batch: int
    """Global batch, in samples."""
    accumulation: int
    """Micro-batches per full step, of each replica."""
    steps: int
    steps_per_epoch: int
    """At first: where the batch grows, later epochs have fewer."""
    epochs: float = 0.0
    """Passes over the data in all."""
    warmup_steps: int
    lr: float
    weight_decay: float
    evaluate_every: int
    """Steps; 0 means never."""
    checkpoint_every: int
    best_metric: str
    """Metric of the best checkpoint."""
    stopping_metric: str
    """Metric of early stopping and the plateau schedule."""
    workers: int
    choices: tuple[Choice, ...]
    trials: tuple[AutotuneTrial, ...] = ()
    """Settings that were tried, in order."""
    prediction: Prediction
    """From passes timed at start-up."""
    estimate: AnalyticPrediction | None = None
    """Analytic prediction; None where operators could not be counted."""
