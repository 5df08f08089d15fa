"""Events of a run, one typed value per kind (``events.jsonl``), and the metrics of a step.

The log is the truth about a run; states, the index, the report and every display are folded from it
(``yunlu.runs.fold``).

Versions: each line carries ``v``, the version of its kind's schema. A line that this program cannot read (a
newer version, an unknown kind, other fields) becomes an ``UnknownEvent``: folds ignore it, so that an
older program still shows the run of a newer one. A line that a crash tore is skipped.
"""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeGuard

from pydantic import Field, TypeAdapter, ValidationError

from yunlu.core.value import Value
from yunlu.hardware.fleet import Device
from yunlu.planning.plan import Measurement, Plan
from yunlu.runs.states import RunState


class StepMetrics(TypedDict):
    """One record per step. After a resume a step may have two records: the later one is valid.

    A plain mapping, not a model: the worker writes one for each step. ``is_step`` checks what it reads.
    """

    step: int
    """Global step, counted from 1."""
    at: float
    """Seconds since the epoch, at the end of the step."""
    attempt: int
    """Number of the attempt (``AttemptStarted``) that made the step."""
    epoch: float
    """Epochs completed, as a fraction."""
    loss: float
    """Mean loss of the step over its true count."""
    lr: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    samples: int
    """Samples consumed so far."""
    items: float
    """Loss items (samples or tokens) of this step."""
    data_s: float
    """Waiting for data."""
    compute_s: float
    """Forward, backward, optimiser."""
    communication_s: float
    """Waiting for other workers."""
    evaluate_s: float
    """Evaluating after the step."""
    checkpoint_s: float
    """Stalled by a checkpoint."""
    memory_bytes: NotRequired[int]
    """Peak resident memory of the worker, or peak allocation on its device, so far."""
    tokens: NotRequired[int]
    """Tokens computed, padding included; where samples have lengths."""
    padding: NotRequired[int]
    """Of these, padding."""
    noise_scale: NotRequired[float]
    """Batch at which noise and signal of the gradient are equal; where measured."""
    noise_sqr: NotRequired[float]
    """Squared norm of the gradient without its noise, averaged over measurements."""
    noise_var: NotRequired[float]
    """Variance of one sample's gradient, averaged over measurements."""
    noise_parts: NotRequired[int]
    """Gradients of a step that were compared; 1: two consecutive steps, which is biased."""
    loss_scale: NotRequired[float]
    """Factor on the loss, under fp16."""
    low_share: NotRequired[float]
    """Share of parameters in low precision; where it may change."""
    exchange_s: NotRequired[float]
    """Gradient exchange, overlapped or not; where workers exchange gradients."""
    sent_bytes: NotRequired[float]
    """Sent to other workers by the one that writes the record."""
    compression_error: NotRequired[float]
    """Share of the gradient that compression left out."""
    staleness: NotRequired[float]
    """Mean number of updates that the step's gradients did not know of; asynchronous workers."""
    generation: NotRequired[int]
    """Generation of the worker group (``WorkerGroupFormed``) that made the step."""


def is_step(record: Any) -> TypeGuard[StepMetrics]:
    """Whether a record of the log is a step: a crash may have torn it."""
    return isinstance(record, dict) and isinstance(record.get("step"), int) and "at" in record


VERSION = 1


class RunEvent(Value):
    """Base of all events: something that happened at one instant."""

    v: Literal[1] = VERSION
    """Version of the schema."""
    at: float = Field(default_factory=time.time)
    """Seconds since the epoch."""


class StateChanged(RunEvent):
    """The run moved to another state."""

    kind: Literal["state"] = "state"
    state: RunState
    reason: str | None = None
    resumed_from_step: int | None = None
    """Of a run that is running: the step of the checkpoint it continues from; None from the start."""
    directory: str | None = None
    """Of a run that was submitted: the working directory of whoever submitted it."""
    seen_at: float | None = None
    """Of a run whose worker vanished: when the worker last wrote."""


class AttemptStarted(RunEvent):
    """A worker or supervisor started to work on the run; each one after the first resumes it."""

    kind: Literal["attempt"] = "attempt"
    number: int
    """1 for the first."""
    pid: int
    process_started_at: float
    """In seconds since boot; with the pid it identifies the process."""
    began_at: float
    """When the attempt began; later than the process where that existed before."""
    own_process: bool = True
    """The process was started for this attempt, at ``began_at``."""
    devices: int | None = None
    """Devices of the attempt; None where a single worker trains."""


class EnvironmentRecorded(RunEvent):
    """Software and hardware that the run uses."""

    kind: Literal["environment"] = "environment"
    yunlu: str
    python: str
    platform: str
    hostname: str
    cores: int
    memory_bytes: int
    devices: tuple[Device, ...]
    packages: dict[str, str]
    git_commit: str | None = None
    git_dirty: bool | None = None
    """Whether tracked files differed from the commit."""
    argv: tuple[str, ...] = ()


class DataOpened(RunEvent):
    """The data set is loaded and split."""

    kind: Literal["data"] = "data"
    fingerprint: str
    source: str
    train: int
    """Samples, as of the other splits."""
    validation: int = 0
    test: int = 0
    revision: str | None = None
    """Commit of a data set from the hub."""
    about: dict[str, Any] = Field(default_factory=dict)
    """What the task reports about its data; the keys are the task's own."""


class ModelBuilt(RunEvent):
    """The model has its initial weights."""

    kind: Literal["model"] = "model"
    name: str
    parameters: int
    trainable: int
    revision: str | None = None
    """Commit of a model from the hub."""


class PlanMade(RunEvent):
    """The plan of the run; written again by each attempt."""

    kind: Literal["plan"] = "plan"
    plan: Plan


class ConfusionCounts(Value):
    """How often each true label (row) was predicted as each label (column)."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


class ScoredExample(Value):
    """One sample of an evaluation, as text for people."""

    input: str
    expected: str
    predicted: str


class Evaluated(RunEvent):
    """The model was evaluated on a split."""

    kind: Literal["evaluation"] = "evaluation"
    split: str
    step: int
    """The step that the weights are from."""
    loss: float
    metrics: dict[str, float]
    """Metrics of the task, without the loss."""
    seconds: float
    confusion: ConfusionCounts | None = None
    examples: tuple[ScoredExample, ...] = ()
    rung: int | None = None
    """Of the validation split: how many evaluations there have been, with this one."""


class CheckpointSaved(RunEvent):
    """A checkpoint is complete."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str
    """Inside the run's directory, or a URL."""
    bytes: int
    seconds: float
    stalled_s: float = 0.0
    """Training waited so long for it."""
    metrics: dict[str, float] = Field(default_factory=dict)


class WarningRaised(RunEvent):
    """Something the user should know that does not end the run."""

    kind: Literal["warning"] = "warning"
    message: str


class ErrorRaised(RunEvent):
    """The error that ends the attempt."""

    kind: Literal["error"] = "error"
    code: str
    message: str
    hint: str | None = None
    traceback: str | None = None
    worker: str | None = None
    """Of several workers, the one that failed; likewise its rank, host and pid."""
    rank: int | None = None
    host: str | None = None
    pid: int | None = None


class ModelExported(RunEvent):
    """The trained model is written."""

    kind: Literal["export"] = "export"
    path: str
    files: tuple[str, ...]
    from_step: int | None = None
    """The step that the weights are from."""


class PredictionMeasured(RunEvent):
    """The quantities that the plan predicted, as measured over the whole run."""

    kind: Literal["measured"] = "measured"
    measured: Measurement


class StepSkipped(RunEvent):
    """The update of a step was left out."""

    kind: Literal["skip"] = "skip"
    step: int
    reason: Literal["not finite", "spike", "passed over", "overflow"]
    loss: float
    norm: float


class RolledBack(RunEvent):
    """Training went back to an earlier checkpoint."""

    kind: Literal["rollback"] = "rollback"
    step: int
    to_step: int
    skipping: tuple[int, ...] = ()
    """Steps whose samples are left out from now on."""


class PrecisionChanged(RunEvent):
    """A module moved between low and full precision."""

    kind: Literal["precision"] = "precision"
    step: int
    module: str
    to: Literal["low", "full"]
    reason: str
    low_share: float
    """Share of the parameters in low precision after the move."""


class MemoryExhausted(RunEvent):
    """Memory ran out; the micro-batch was reduced."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    step: int
    micro_batch: int
    """The new one."""
    message: str


class PhaseTime(Value):
    """Time of one phase of the traced steps."""

    name: str
    """``data``, ``forward``, ``backward``, ``clip``, ``step``; ``other`` is the rest."""
    total_s: float
    share: float


class OperatorTime(Value):
    """Time of one operator in the traced steps, without the operators it called."""

    name: str
    self_s: float
    share: float
    calls: int


class TraceWritten(RunEvent):
    """A few steps were profiled."""

    kind: Literal["trace"] = "trace"
    path: str | None = None
    """Inside the run's directory; None where it could not be written."""
    first_step: int
    """Counted from the start of the attempt."""
    steps: int
    wall_s: float
    phases: tuple[PhaseTime, ...]
    table: tuple[OperatorTime, ...]


class WorkerRank(Value):
    """One worker and its position in the layout."""

    rank: int
    worker: str
    """Names the process as long as it lives, whatever its rank becomes."""
    host: str
    pid: int | None = None
    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    tp: int = 0


class WorkerGroupFormed(RunEvent):
    """A generation of workers trains together, from its first completed step on."""

    kind: Literal["worker_group"] = "worker_group"
    generation: int
    layout: str
    reason: str
    from_step: int
    """Newest step that its state holds; the next one is its first."""
    redone_steps: int = 0
    lost_s: float | None = None
    """Seconds without a new step before its first one."""
    ranks: tuple[WorkerRank, ...]
    stages: tuple[str, ...] = ()
    """Content of each pipeline stage, where known."""


class WorkerLost(RunEvent):
    """A worker was lost, or left."""

    kind: Literal["fault"] = "fault"
    cause: str
    """``killed``, ``hung``, ``cut off``, ``left``, ``failed``, ``lost``."""
    worker: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    step: int | None = None
    detail: str | None = None


class StragglerSeen(RunEvent):
    """A worker slows the others down, or no longer does."""

    kind: Literal["straggler"] = "straggler"
    worker: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    step: int | None = None
    ratio: float
    """Its step time over the median of all."""
    recovered: bool = False


class ExchangeSetting(Value):
    """Method, codec and parameters of the gradient exchange."""

    method: str
    codec: str = "none"
    bucket_bytes: int = 25 << 20
    every: int = 1
    """Steps between two exchanges, of local methods."""
    delay_steps: int = 0
    """Steps for which an exchange of a local method may be under way."""
    rank: int = 4
    """Of PowerSGD."""


class ExchangePrediction(Value):
    """Predicted time and traffic of a step with the chosen setting."""

    step_s: float
    exchange_s: float
    hidden_s: float
    """Part of the exchange that overlaps with computation."""
    bytes_per_step: float
    steps_factor: float
    one_exchange_s: float
    begin_s: float = 0.0


class ExchangeCandidate(Value):
    """Predicted cost of one of the settings that were compared."""

    name: str
    step_s: float
    cost_s: float
    """Time for the progress of one plain step: with the further steps that the setting may need."""


class RefusedSetting(Value):
    """A setting that was not considered, and why."""

    name: str
    reason: str


class MeasuredLinks(Value):
    """Links between hosts, in the order in which ``hosts`` first names them."""

    hosts: tuple[str, ...]
    """Of each worker."""
    latency_s: tuple[tuple[float, ...], ...]
    """From one host (row) to another; within a host on the diagonal."""
    bytes_per_s: tuple[tuple[float, ...], ...]
    send_bytes_per_s: tuple[float, ...]
    receive_bytes_per_s: tuple[float, ...]
    compute_s: tuple[float, ...] = ()
    """A step of each worker without any exchange."""


class CommunicationChosen(RunEvent):
    """The workers exchange gradients in another way from now on."""

    kind: Literal["communication"] = "communication"
    step: int
    chosen: str
    """Name of the setting."""
    setting: ExchangeSetting
    guarantee: str
    reason: str
    predicted: ExchangePrediction | None = None
    """None where nothing was measured; then there are no candidates and links either."""
    candidates: tuple[ExchangeCandidate, ...] = ()
    refused: tuple[RefusedSetting, ...] = ()
    links: MeasuredLinks | None = None
    excluded: tuple[int, ...] = ()
    """Ranks of stragglers that leave: the others are faster without them."""


class BatchChanged(RunEvent):
    """Another batch size, or another learning rate for it."""

    kind: Literal["batch"] = "batch"
    step: int
    """First step with it, from 1."""
    batch: int
    rate: float = 1.0
    """Factor on the learning rate."""
    gain: float = 1.0
    """Steps of the first batch that one of these is worth."""
    noise_scale: float | None = None
    steps: int
    """Of the whole run now."""


class ProgressReported(RunEvent):
    """What the worker does while no step is made."""

    kind: Literal["progress"] = "progress"
    phase: str


class UnknownEvent(Value):
    """A line that this version cannot read: of a newer version, or of an unknown kind."""

    v: int | None = None
    kind: str
    at: float
    content: dict[str, Any]
    problem: str
    """What does not fit."""


KnownEvent = (
    StateChanged
    | AttemptStarted
    | EnvironmentRecorded
    | DataOpened
    | ModelBuilt
    | PlanMade
    | Evaluated
    | CheckpointSaved
    | WarningRaised
    | ErrorRaised
    | ModelExported
    | PredictionMeasured
    | StepSkipped
    | RolledBack
    | PrecisionChanged
    | MemoryExhausted
    | TraceWritten
    | WorkerGroupFormed
    | WorkerLost
    | StragglerSeen
    | CommunicationChosen
    | BatchChanged
    | ProgressReported
)
Event = KnownEvent | UnknownEvent


def to_record(event: Event) -> dict[str, Any]:
    """The line of ``events.jsonl``, as a JSON object."""
    if isinstance(event, UnknownEvent):
        return event.content
    return json.loads(event.model_dump_json())  # by way of text: JSON itself has no NaN


def parse_event(record: Any) -> Event | None:
    """The event of one line; None where the line is no event at all."""
    try:
        return _adapter().validate_python(record)
    except ValidationError as error:
        return _as_unknown(record, error)


def event_fields(event: Event) -> dict[str, Any]:
    """What an event says beyond kind and time, as JSON values; for displays of any kind."""
    if isinstance(event, UnknownEvent):
        return {key: value for key, value in event.content.items() if key not in _ENVELOPE}
    return json.loads(event.model_dump_json(exclude=_ENVELOPE, exclude_none=True))


_ENVELOPE = {"v", "kind", "at"}


@cache
def _adapter() -> TypeAdapter[KnownEvent]:
    return TypeAdapter(Annotated[KnownEvent, Field(discriminator="kind")])


def _as_unknown(record: Any, error: ValidationError) -> UnknownEvent | None:
    if not isinstance(record, dict):
        return None
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    try:
        return UnknownEvent(
            v=record.get("v"),
            kind=record["kind"],
            at=record["at"],
            content=record,
            problem=f"{where}: {first['msg']}" if where else first["msg"],
        )
    except (KeyError, ValidationError):
        return None
