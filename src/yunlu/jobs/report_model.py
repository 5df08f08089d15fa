"""Report model: the values of ``report.json`` and of the report page."""

from __future__ import annotations

from typing import Any

from yunlu.core.value import Value
from yunlu.jobs.communication import Communication
from yunlu.planning.plan import Plan
from yunlu.runs.events import ModelExported, ScoredExample, StragglerSeen, TraceWritten
from yunlu.runs.fold import GroupGeneration, Incident, LostWorker
from yunlu.runs.states import RunState


class Curve(Value):
    """One quantity over the global step, thinned to at most 1,000 points."""

    key: str
    """``train_loss``, ``lr``, ..., or ``validation/METRIC``."""
    steps: tuple[int, ...]
    values: tuple[float, ...]


class TimeSplit(Value):
    """Where the time went."""

    totals: dict[str, float]
    """Seconds by part, over all attempts of the run."""
    steps: tuple[int, ...]
    """Last step of each span."""
    shares: dict[str, tuple[float, ...]]
    """Share of each part in each span; they add up to 1."""


class Comparison(Value):
    """A predicted quantity beside its measured value."""

    quantity: str
    """A field of ``Prediction``."""
    estimated: float | None = None
    """Analytic estimate, before anything was timed."""
    interval: tuple[float, float] | None = None
    """10 to 90 % of what was predicted."""
    inside: bool | None = None  # whether the measured value is in the interval; None while unknown
    predicted: float | None
    measured: float | None
    ratio: float | None
    """Measured over predicted; None where either is missing or the run is not complete."""
    so_far: bool
    """A total that still grows."""

    @property
    def is_known(self) -> bool:
        """Whether any value is known."""
        return any(item is not None for item in (self.estimated, self.predicted, self.measured))


class EvaluationRow(Value):
    """Scores on one split after one step."""

    split: str
    step: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float | None
    best: bool
    """Best validation score by the headline metric."""


class Headline(Value):
    """The headline metric."""

    metric: str
    value: float
    split: str
    step: int


class ClassScore(Value):
    """Scores of one label; None where undefined."""

    label: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class ConfusionMatrix(Value):
    """Counts of true label (row) against predicted label (column)."""

    split: str
    step: int
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    classes: tuple[ClassScore, ...]


class SavedCheckpoint(Value):
    """A checkpoint that was written; only the last and the best are kept."""

    step: int
    path: str
    bytes: float | None
    seconds: float | None
    stalled_s: float | None
    metrics: dict[str, float]
    is_kept: bool


class Failure(Value):
    """Why the run failed."""

    code: str
    message: str
    hint: str | None
    traceback: str | None
    worker: str | None = None
    """Of several workers, the one that failed first: ``worker 3 (rank 2 on node-a)``."""


class RunEnvironment(Value):
    """Environment of the run."""

    yunlu: str | None
    python: str | None
    platform: str | None
    git_commit: str | None
    git_dirty: bool | None
    """Whether tracked files differed from the commit."""
    packages: dict[str, str]
    devices: tuple[str, ...]


class DataLineage(Value):
    """Provenance of the model."""

    fingerprint: str | None
    source: str | None
    counts: dict[str, int]
    about: dict[str, Any]


class Finding(Value):
    """One observation that stands out; ``yunlu.render`` has its sentence in each language."""

    key: str
    """Key of the sentence: ``finding.KEY`` in the texts."""
    fields: dict[str, str]
    """Values in the sentence."""


class PaddingCost(Value):
    """Cost of padding."""

    tokens: float
    """Tokens computed, padding included."""
    padding: float

    @property
    def share(self) -> float:
        """Share of all tokens computed."""
        return self.padding / self.tokens if self.tokens else 0.0


class WorkerStats(Value):
    """Step statistics of one worker, in its last layout."""

    worker: str
    rank: int | None
    """In the newest layout; None once it has left."""
    host: str
    pid: int | None
    step_s: float | None
    """Mean, including waiting."""
    wait_s: float | None
    """Part of it spent waiting for others."""
    memory_bytes: float | None
    """Peak over all attempts."""
    lost: str | None
    """Cause of its loss."""
    steps: tuple[int, ...]
    compute_s: tuple[float, ...]
    """Step time without waiting, over all its steps."""

    @property
    def wait_share(self) -> float | None:
        """Share of its time spent waiting for others."""
        if self.wait_s is None or not self.step_s:
            return None
        return min(self.wait_s / self.step_s, 1.0)


class WorkerGroupHistory(Value):
    """History of the worker groups of a run."""

    effective: float | None
    """Share of the time since the first step in which new steps were made."""
    wall_s: float
    lost_s: float
    redone_steps: int
    communication_share: float | None
    """Share of the step time."""
    changes: tuple[GroupGeneration, ...]
    faults: tuple[LostWorker, ...]
    stragglers: tuple[StragglerSeen, ...]
    workers: tuple[WorkerStats, ...]
    began_at: float
    """Start of the first step."""
    pauses: tuple[tuple[float, float], ...]
    """Beginning and end of each time without workers."""
    elapsed_s: tuple[float, ...]
    """Seconds since the first step, beside ``done_steps``."""
    done_steps: tuple[int, ...]

    def elapsed_at(self, at: float) -> float:
        """Seconds since the first step, without pauses."""
        paused = ((min(at, until), since) for since, until in self.pauses)
        return at - self.began_at - sum(max(end - since, 0.0) for end, since in paused)

    @property
    def newest(self) -> GroupGeneration:
        """The current or last layout."""
        return self.changes[-1]


class Report(Value):
    """Report of one run."""

    run_id: str
    path: str
    name: str
    task: str | None
    model: str | None
    parameters: int | None
    trainable: int | None
    state: RunState
    reason: str | None
    created_at: float | None
    finished_at: float | None
    """Last event, once the run is no longer active."""
    attempts: int  # number of attempts; each after the first is a resume
    resumed_from: tuple[int | None, ...]
    """Step that each later attempt resumed from, where known."""
    step: int
    epoch: float | None
    job: dict[str, Any]
    job_yaml: str
    """Keys that the job sets, without defaults."""
    plan: Plan | None
    comparisons: tuple[Comparison, ...]
    headline: Headline | None
    curves: tuple[Curve, ...]
    time: TimeSplit | None
    findings: tuple[Finding, ...]
    incidents: tuple[Incident, ...]
    """In order, including those of undone steps."""
    padding: PaddingCost | None
    trace: TraceWritten | None
    worker_group: WorkerGroupHistory | None = None
    """Only where several workers trained."""
    communication: Communication | None = None  # likewise
    evaluations: tuple[EvaluationRow, ...]
    confusion: ConfusionMatrix | None
    examples: tuple[ScoredExample, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    warnings: tuple[str, ...]
    failure: Failure | None
    environment: RunEnvironment | None
    lineage: DataLineage | None
    exported: ModelExported | None

    def curve(self, key: str) -> Curve | None:
        """The curve of this name, if the run recorded one."""
        return next((curve for curve in self.curves if curve.key == key), None)

    def comparison(self, quantity: str) -> Comparison:
        """Predicted and measured value of a field of ``Prediction``."""
        return next(
            one_comparison
            for one_comparison in self.comparisons
            if one_comparison.quantity == quantity
        )


class ReportPage(Value):
    """The report as one self-contained HTML page."""

    location: str
    html: str
