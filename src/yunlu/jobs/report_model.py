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
    """Seconds by part, over all lives of the run."""
    steps: tuple[int, ...]
    """The last step of each stretch."""
    shares: dict[str, tuple[float, ...]]
    """Share of each part in each stretch; they add up to 1."""


class Comparison(Value):
    """One predicted quantity beside what was measured."""

    quantity: str
    """A field of ``Prediction``."""
    estimated: float | None = None
    """Before anything was timed."""
    interval: tuple[float, float] | None = None
    """10 to 90 % of what was predicted."""
    inside: bool | None = None  # whether the measured value is; None while that cannot be said
    predicted: float | None
    measured: float | None
    ratio: float | None
    """Measured over predicted; None where either is missing or the run is not complete."""
    so_far: bool
    """A total that is still growing."""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell."""
        return any(item is not None for item in (self.estimated, self.predicted, self.measured))


class EvaluationRow(Value):
    """The scores on one split after one step."""

    split: str
    step: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float | None
    best: bool
    """The best on the validation data, by the headline metric."""


class Headline(Value):
    """The figure people quote."""

    metric: str
    value: float
    split: str
    step: int


class ClassScore(Value):
    """How well one label was found; None where nothing allows a score."""

    label: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class ConfusionMatrix(Value):
    """How often each true label (row) was taken for each label (column)."""

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
    """On what the run ran."""

    yunlu: str | None
    python: str | None
    platform: str | None
    git_commit: str | None
    git_dirty: bool | None
    """Whether tracked files differed from the commit."""
    packages: dict[str, str]
    devices: tuple[str, ...]


class DataLineage(Value):
    """From what the model was made."""

    fingerprint: str | None
    source: str | None
    counts: dict[str, int]
    about: dict[str, Any]


class Finding(Value):
    """One observation that stands out; ``yunlu.render`` has its sentence in each language."""

    key: str
    """Names the sentence: ``finding.KEY`` among the texts."""
    fields: dict[str, str]
    """What the sentence quotes."""


class PaddingCost(Value):
    """What samples of different length cost."""

    tokens: float
    """Computed over the run, padding included."""
    padding: float

    @property
    def share(self) -> float:
        """Of all that was computed."""
        return self.padding / self.tokens if self.tokens else 0.0


class WorkerStats(Value):
    """What a step took one worker, in the last layout that it was part of."""

    worker: str
    rank: int | None
    """In the newest layout; None once it is gone."""
    host: str
    pid: int | None
    step_s: float | None
    """Mean, waiting included."""
    wait_s: float | None
    """Of this, waiting for others."""
    memory_bytes: float | None
    """The most seen in its whole life."""
    lost: str | None
    """The fault that took it."""
    steps: tuple[int, ...]
    compute_s: tuple[float, ...]
    """Its step time without the waiting, over the steps of its whole life."""

    @property
    def wait_share(self) -> float | None:
        """Waiting for others, of its time."""
        if self.wait_s is None or not self.step_s:
            return None
        return min(self.wait_s / self.step_s, 1.0)


class WorkerGroupHistory(Value):
    """How several workers trained together."""

    effective: float | None
    """Share of the time since the first step began in which new steps were made."""
    wall_s: float
    lost_s: float
    redone_steps: int
    communication_share: float | None
    """Of the steps' time."""
    changes: tuple[GroupGeneration, ...]
    faults: tuple[LostWorker, ...]
    stragglers: tuple[StragglerSeen, ...]
    workers: tuple[WorkerStats, ...]
    began_at: float
    """When the first step began."""
    pauses: tuple[tuple[float, float], ...]
    """From when until when nobody was there to train."""
    elapsed_s: tuple[float, ...]
    """Since the first step began, beside ``done_steps``: how far the run was when."""
    done_steps: tuple[int, ...]

    def elapsed_at(self, at: float) -> float:
        """Seconds since the first step began, pauses left out."""
        paused = ((min(at, until), since) for since, until in self.pauses)
        return at - self.began_at - sum(max(end - since, 0.0) for end, since in paused)

    @property
    def newest(self) -> GroupGeneration:
        """The layout as it is, or was at the end."""
        return self.changes[-1]


class Report(Value):
    """Everything about one run."""

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
    """The last sign of life, once the run rests."""
    attempts: int  # how often a worker started; each one after the first is a resume
    resumed_from: tuple[int | None, ...]
    """The step each later life went on from, where it is known."""
    step: int
    epoch: float | None
    job: dict[str, Any]
    job_yaml: str
    """What the job sets; what stands at its default is left out."""
    plan: Plan | None
    comparisons: tuple[Comparison, ...]
    headline: Headline | None
    curves: tuple[Curve, ...]
    time: TimeSplit | None
    findings: tuple[Finding, ...]
    incidents: tuple[Incident, ...]
    """In the order they happened, those of undone steps included."""
    padding: PaddingCost | None
    trace: TraceWritten | None
    worker_group: WorkerGroupHistory | None = None
    """Only where several workers trained together."""
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
        """Predicted beside measured for a field of ``Prediction``."""
        return next(
            one_comparison
            for one_comparison in self.comparisons
            if one_comparison.quantity == quantity
        )


class ReportPage(Value):
    """The report as one self-contained HTML page."""

    location: str
    html: str
