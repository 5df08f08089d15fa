"""Plan: decisions for one run, their reasons, the prediction, and what measurements changed. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from yunlu.core.html_table import html_table
from yunlu.core.units import estimate_time, show_bytes, show_duration, show_share
from yunlu.core.value import Value
from yunlu.hardware.catalog import HERE
from yunlu.hardware.fleet import Link
from yunlu.planning.large_batch import Rule
from yunlu.planning.layouts import Layout, SplitConstraints, parse_layout
from yunlu.spec.optimizers import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_WORDS = {
    "compute": "computing",
    "tp": "tensor parallel",
    "pp_bubble": "pipeline bubble",
    "dp": "gradients and shards",
    "optimizer": "optimiser",
    "input": "input",
    "other": "other",
}
_WAITS = {
    "tp": "tensor parallel waits for links",
    "pp_bubble": "pipeline bubble",
    "dp": "waits for gradients and shards",
    "input": "waits for input",
    "other": "overheads of small work",
}
_MUCH = 0.15
"""Share of a step that is worth mentioning."""
_ALIKE = 1.05


def explain_plan(plan: Plan) -> str:
    """Memory and time of one plan, by component."""
    parts, hardware = plan.prediction, plan.hardware
    lines = [f"{hardware} ({hardware.device}): {describe_layout(plan)}"]
    if plan.reason:
        lines.append(f"  {plan.reason}")
    lines.append(f"  memory of a device: {show_interval(plan.memory_bytes, show_bytes)}")
    lines += _shares(parts.memory_parts, show_bytes, {})
    lines.append(f"  a step: {_show_time(plan.step_s)}")
    lines += _time_shares(parts.step_parts, plan.step_s, _STEP_WORDS)
    lines.append(f"  in all: {_show_time(plan.total_s)}")
    lines += _time_shares(parts.total_parts, plan.total_s, {})
    lines += [f"  {item.name} {item.value}: {item.reason}" for item in plan.choices if item.reason]
    text = " ".join(f"--set {shlex.quote(override)}" for override in plan.overrides)
    lines.append(f"  to train it so: yunlu train JOB {text}")
    return "\n".join(lines)


def describe_layout(plan: Plan) -> str:
    """``dp8 x tp2, micro-batch 4 x 2, selective recompute, bf16``."""
    parts = [str(plan.layout) + (", zero1" if plan.layout.zero1 else "")]
    parts.append(f"micro-batch {plan.micro_batch} x {plan.accumulation}")
    if plan.recompute != "none":
        parts.append(f"{plan.recompute} recompute")
    parts.append(plan.precision)
    return ", ".join(parts)


def show_interval(interval: Interval, show: object) -> str:
    """``3.1 h (2.6 h to 3.8 h)``."""
    show_value = show if callable(show) else str
    return (
        f"{show_value(interval.value)} ({show_value(interval.low)} to {show_value(interval.high)})"
    )


def _show_time(interval: Interval) -> str:
    """``15 min (12–21 min)``: as in the table of options."""
    value, between = estimate_time(*interval.edges)
    return f"{value} ({between})" if between else value


def main_wait(plan: Plan) -> str:
    """Largest component of a step besides compute, if it is large; else empty."""
    step_s = max(plan.step_s.value, 1e-12)
    lost = {name: plan.prediction.step_parts.get(name, 0.0) / step_s for name in _WAITS}
    name = max(lost, key=lambda item: lost[item])
    return f"{_WAITS[name]} {lost[name]:.0%}" if lost[name] >= _MUCH else ""


def compare(value: float, best: float, worse: str) -> str:
    """``3.1x dearer``; empty where they are similar."""
    if best <= 0 or value <= best * _ALIKE:
        return ""
    return f"{value / best:.1f}x {worse}" if value < 100 * best else f"{value / best:,.0f}x {worse}"


def _time_shares(parts: dict[str, float], whole: Interval, labels: dict[str, str]) -> list[str]:
    return _shares(parts, lambda part_s: show_share(part_s, whole.value), labels)


def _shares(
    parts: dict[str, float], show: Callable[[float], str], labels: dict[str, str]
) -> list[str]:
    whole = sum(parts.values()) or 1.0
    return [
        f"    {labels.get(name, name.replace('_', ' ')):<20}{show(value):>9}  {value / whole:4.0%}"
        for name, value in parts.items()
        if value > 0.0005 * whole
    ]


Basis = Literal["analytic", "measured"]
"""Where figures come from: counted operators and fitted models, or passes timed on the hardware itself."""
PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Compiler = Literal["none", "inductor", "xla"]
Padding = Literal["pad", "bucket", "pack"]
Recompute = Literal["none", "selective", "full"]


def _read_layout(value: Any) -> Any:
    """Plans that were written as ``single`` are still read."""
    return (parse_layout(value) or value) if isinstance(value, str) else value


class Interval(Value):
    """Expected value and 80 % interval."""

    value: float
    low: float
    """10 % quantile."""
    high: float
    """90 % quantile."""

    @property
    def edges(self) -> tuple[float, float, float]:
        """The expected value, then both quantiles."""
        return self.value, self.low, self.high

    def times(self, factor: float) -> Interval:
        """All three, multiplied."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class Hardware(Value):
    """Nodes of one kind; by default this machine, of which nothing is known yet."""

    cloud: str = HERE
    """``here`` for this machine."""
    instance: str = ""
    region: str = ""
    nodes: int = 1
    device: str = ""
    devices_per_node: int = 1
    spot: bool = False
    """Whether the cloud may preempt them."""
    dollars_per_hour: float | None = None
    """Price of all nodes; None where unknown."""
    memory_bytes: float = 0.0
    """Memory of one device."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        """Such as ``aws p5.48xlarge x 2, spot``."""
        name = self.cloud if self.cloud == HERE else f"{self.cloud} {self.instance}"
        count = f" x {self.nodes}" if self.nodes > 1 else ""
        return f"{name}{count}{', spot' if self.spot else ''}"


class StepSettings(Value):
    """How a step is computed: what start-up may vary without changing the objective."""

    threads: int
    """CPU threads for compute; 0 before a worker has chosen them."""
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


class MeasuringTime(Value):
    """How long measuring before the first step took, of what the job allows."""

    took_s: float
    limit_s: float
    share: float
    """Share of the run that the job allows."""
    left_out: tuple[str, ...] = ()
    """What was estimated instead."""


class DatasetSize(Value):
    """Samples of each split."""

    train: int
    validation: int
    test: int


class Profile(Value):
    """A model and its data as plain numbers, measured or predicted."""

    basis: Basis = "measured"
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
    measuring: MeasuringTime | None = None
    """Duration of all measurements; None for a predicted profile."""
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


class PlanChange(Value):
    """A decision or figure of the submitted plan that measurements changed."""

    name: str
    planned: str
    refined: str
    reason: str


class Prediction(Value):
    """Predicted memory, time and cost of a plan."""

    basis: Basis = "measured"
    memory_bytes: float
    """Of one worker."""
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None = None
    """None where samples have no tokens, or nobody counted them."""
    total_s: float
    """To the finished model: from the start of the worker, or from requesting the nodes."""
    dollars: float | None
    """None where the machine has no price."""
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """10 to 90 % interval of some quantities."""
    memory_parts: dict[str, float] = Field(default_factory=dict)
    """Bytes by component; empty where they were not told apart, as below."""
    step_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds of a step by component."""
    total_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds in total: start-up, steps, evaluation, interruptions."""


class AnalyticPrediction(Prediction):
    """Prediction before any pass is timed: from counted operators and the machine's profile."""

    basis: Basis = "analytic"
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


class RankRehearsal(Value):
    """Memory of one worker in a rehearsed step."""

    rank: int
    peak_bytes: int
    """Most bytes of tensors at a time."""
    phase: str
    """What was being done then."""
    parts: dict[str, int]
    """Bytes at that moment, by what they hold."""


class Rehearsal(Value):
    """A step on fake tensors: what it takes, without paying for a device."""

    ranks: tuple[RankRehearsal, ...]
    """One worker of each pipeline stage: the others hold no more."""
    kernels: str
    """Kind of device whose kernels were assumed."""
    cpu_s: float
    samples: int
    """Samples of the rehearsed micro-batch."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest worker."""
        return max(rank.peak_bytes for rank in self.ranks)


class Plan(StepSettings):
    """Everything that was decided about a run beyond its job, and what is predicted of it."""

    hardware: Hardware = Hardware()
    """Nodes it was made for."""
    reason: str = ""
    """Why it won or lost, where it is one of several options."""
    device: str
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
    lr_scaling: Rule = "none"
    """How the learning rate scales with the batch."""
    lr_factor: float = 1.0
    """Factor on the rate of the job's ``base_batch``."""
    weight_decay: float
    evaluate_every: int
    """Steps; 0 means never."""
    checkpoint_every: int
    best_metric: str
    """Metric of the best checkpoint; ``auto`` before a worker has opened the task."""
    stopping_metric: str
    """Metric of early stopping and the plateau schedule."""
    workers: int
    choices: tuple[Choice, ...]
    refinements: tuple[PlanChange, ...] = ()
    """Where the worker departed from the plan that was submitted."""
    trials: tuple[AutotuneTrial, ...] = ()
    """Settings that were tried, in order."""
    measuring: MeasuringTime | None = None
    """What measuring took; None before a worker has measured."""
    warnings: tuple[str, ...] = ()
    """What the job asks for and will not get."""
    prediction: Prediction
    """Before anyone pays from fitted models; in the worker from passes timed at start-up."""
    estimate: AnalyticPrediction | None = None
    """What the worker expected before it timed anything; None where operators could not be counted."""
    _again: Callable[[dict[str, Any]], Plan] | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        # Not compared: whether a plan can be predicted again.
        return isinstance(other, Plan) and self.__dict__ == other.__dict__

    __hash__ = Value.__hash__

    def _repr_html_(self) -> str:
        """Choices with their reasons, and what is predicted, for a notebook."""
        memory, total = show_bytes(self.memory_bytes.value), show_duration(self.total_s.value)
        step = show_duration(self.step_s.value)
        return html_table(
            [(choice.name, choice.value, choice.reason) for choice in self.choices],
            title=f"{self.hardware} ({self.hardware.device}): {describe_layout(self)}",
            note=f"predicted: {memory} · {step} a step · {total} in all",
        )

    def replace(self, **changes: Any) -> Plan:
        """The same hardware with another layout or work, predicted and checked again.

        Args:
            changes: ``dp``, ``fsdp``, ``tp``, ``pp``, ``zero1``, ``batch``, ``micro_batch``,
                ``recompute``, ``precision``, ``nodes``, ``spot``. What is not said stays, but
                ``dp``, ``fsdp`` and ``micro_batch`` follow where they must.
        """
        if self._again is None:
            raise TypeError("a plan read from a file has forgotten its job: plan it again")
        return self._again(changes)

    def with_recall(self, again: Callable[[dict[str, Any]], Plan]) -> Plan:
        """The same, with the query to predict it again."""
        copy = self.model_copy()
        copy._again = again
        return copy

    @property
    def memory_bytes(self) -> Interval:
        """Peak of one device."""
        return self._interval("memory_bytes", self.prediction.memory_bytes)

    @property
    def headroom(self) -> float:
        """Free share of the device's memory even at the 90 % quantile."""
        return 1.0 - self.memory_bytes.high / max(self.hardware.memory_bytes, 1.0)

    @property
    def step_s(self) -> Interval:
        """Of one step."""
        return self._interval("step_s", self.prediction.step_s)

    @property
    def samples_per_s(self) -> Interval:
        """Of all devices together."""
        return self._interval("samples_per_s", self.prediction.samples_per_s)

    @property
    def tokens_per_s(self) -> Interval | None:
        """None where samples have no tokens."""
        figure = self.prediction.tokens_per_s
        return None if figure is None else self._interval("tokens_per_s", figure)

    @property
    def total_s(self) -> Interval:
        """To the finished model."""
        return self._interval("total_s", self.prediction.total_s)

    @property
    def dollars(self) -> Interval | None:
        """None where the price is unknown."""
        figure = self.prediction.dollars
        return None if figure is None else self._interval("dollars", figure)

    def _interval(self, quantity: str, value: float) -> Interval:
        low, high = self.prediction.intervals.get(quantity, (value, value))
        return Interval(value=value, low=low, high=high)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Values for ``--set`` that train a job exactly so."""
        layout = {axis: self.layout.size_of(axis) for axis in ("dp", "fsdp", "tp", "pp")}
        switches = {name: True for name in ("sequence", "zero1") if getattr(self.layout, name)}
        stages = self.layout.stages_per_rank
        more = {"schedule": "interleaved", "stages_per_rank": stages} if stages > 1 else {}
        return (
            f"devices={self.layout.world}",
            f"layout={json.dumps({**layout, **switches, **more})}",
            f"train.batch={self.batch}",
            f"train.micro_batch={self.micro_batch}",
            f"train.recompute={self.recompute}",
            f"train.precision={self.precision}",
            *([] if self.lr_scaling == "none" else [f"train.optimizer.scaling={self.lr_scaling}"]),
        )

    def explain(self) -> str:
        """Memory and time by component."""
        return explain_plan(self)

    def to_json(self) -> str:
        """Everything, for programs."""
        return self.model_dump_json(indent=2)


_FIGURES = {
    "memory_bytes": ("memory", show_bytes),
    "step_s": ("step time", show_duration),
    "total_s": ("total time", show_duration),
}


def refine(planned: Plan, measured: Plan) -> Plan:
    """The measured plan, with the differences from the one that was submitted.

    What the submitted plan pinned and the worker kept keeps its reason.
    """
    before = {choice.name: choice for choice in planned.choices}
    choices = tuple(_keep_reason(before.get(item.name), item) for item in measured.choices)
    changes = (*_changed_choices(planned, measured), *_changed_figures(planned, measured))
    return measured.model_copy(update={"choices": choices, "refinements": changes})


def _keep_reason(planned: Choice | None, now: Choice) -> Choice:
    is_handed_over = planned is not None and now.pinned and not planned.pinned
    if planned is None or not is_handed_over or planned.value != now.value:
        return now
    return now.model_copy(update={"reason": f"as planned: {planned.reason}"})


def _changed_choices(planned: Plan, measured: Plan) -> Iterator[PlanChange]:
    """Decisions of both plans that differ; what only a worker can decide was never planned."""
    before = {choice.name: choice.value for choice in planned.choices}
    # The catalog and the driver name one device differently.
    is_same_device = planned.hardware.cloud == HERE and planned.device == measured.device
    for choice in measured.choices:
        was = before.get(choice.name, choice.value)
        if was != choice.value and not (choice.name == "device" and is_same_device):
            yield PlanChange(
                name=choice.name, planned=was, refined=choice.value, reason=choice.reason
            )


def _changed_figures(planned: Plan, measured: Plan) -> Iterator[PlanChange]:
    """Predicted figures that lie outside the interval that was shown."""
    for quantity, (name, show) in _FIGURES.items():
        interval, now = getattr(planned, quantity), getattr(measured.prediction, quantity)
        if not interval.low <= now <= interval.high:
            yield PlanChange(
                name=name,
                planned=_show_time(interval)
                if show is show_duration
                else show_interval(interval, show),
                refined=show(now),
                reason="from passes that the worker timed",
            )
