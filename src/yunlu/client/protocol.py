"""The facade: what a client can do. Every answer is a frozen value that survives a trip through JSON.

A run is named by its id, a unique prefix of it, ``last``, or the path of its directory; a study by its name
or ``last``. A failure is a ``YunluError`` with a stable code. What every implementation must do is in
``yunlu.testing.clients.ClientContract``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from yunlu.hardware.entries import Additions
    from yunlu.hardware.listing import (
        DevicePage,
        ImportedTable,
        ListedDevice,
        ListedOffer,
        OfferedDevice,
        OwnershipPage,
    )
    from yunlu.jobs.calibration import ForgottenRuns, ProbeProgress, ProbeResult
    from yunlu.jobs.cleanup import CleanupPlan, CleanupResult
    from yunlu.jobs.doctor import MachineFindings
    from yunlu.jobs.lifecycle import WorkerResize
    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.jobs.predict_table import PredictedRow
    from yunlu.jobs.report_model import Report, ReportPage
    from yunlu.jobs.run_log import LogCursor, RunUpdate
    from yunlu.jobs.run_record import ListedRun, RunList
    from yunlu.jobs.run_view import JoinTarget, LogText, RunDetails, RunFailure, StartedRun
    from yunlu.jobs.selftest import SelftestProgress, SelftestResult
    from yunlu.jobs.space import DiskUsage
    from yunlu.planning.plan import Plan, Rehearsal
    from yunlu.runs.events import Event
    from yunlu.scheduler.pool_view import Explanation, PoolDown, PoolUp, PoolView, QueuedRun
    from yunlu.scheduler.queue import QueueEntry
    from yunlu.spec.job import Job
    from yunlu.spec.load import Validation
    from yunlu.tuning.facts import StudyView
    from yunlu.tuning.session import (
        StoppedStudy,
        StudyList,
        StudyOutlook,
        StudyResult,
        StudyStart,
    )


class JobVerbs(Protocol):
    """Jobs and plans: nothing is trained."""

    def validate(self, job: str, *, overrides: Sequence[str] = ()) -> Validation:
        """Check a job file: the job, or every problem of it."""
        ...

    def plan(self, job: Job, *, top: int = 3, candidates: bool = False) -> PlanOutcome:
        """Choose hardware and layouts, predict time and cost; optionally list all candidates."""
        ...

    def measure(self, job: Job, *, on_event: Callable[[Event], None] | None = None) -> Plan:
        """Let a worker measure the job on this machine, and return its plan."""
        ...

    def rehearse(self, job: Job, plan: Plan) -> Rehearsal:
        """Run one step of a plan on fake tensors; raise the errors that training would raise."""
        ...

    def load_plan(self, text: str) -> Plan:
        """A plan from a file: ``FILE``, or ``FILE:N`` for one of the options in it."""
        ...

    def predict(self, table: Path) -> tuple[PredictedRow, ...]:
        """Predict speed and memory of each row of a CSV table."""
        ...


class RunVerbs(Protocol):
    """Runs: start, watch, stop."""

    def train(
        self,
        job: Job,
        *,
        source: Path | None = None,
        plan: Plan | None = None,
        detach: bool = False,
    ) -> StartedRun:
        """Create a run of a job and start it; ``source`` is kept with the run.

        The choices of a ``plan`` are pinned. Without one, what is expected on this machine is kept with
        the run where that is known at once; the worker says where it departs from either.
        """
        ...

    def finetune(
        self, start: str, job: str, *, overrides: Sequence[str] = (), detach: bool = False
    ) -> StartedRun:
        """Create a run that starts from a trained model, and start it."""
        ...

    def resume(self, run: str, *, detach: bool = False) -> StartedRun:
        """Continue a stopped, failed or lost run from its newest good checkpoint."""
        ...

    def resize(self, run: str, *, devices: int) -> WorkerResize:
        """Change the number of workers while the run trains."""
        ...

    def find_group(self, host: str, port: int, token: str, *, name: str | None) -> JoinTarget:
        """The run whose worker group listens at an address."""
        ...

    def join(self, target: JoinTarget, *, devices: int) -> int:
        """Lend devices of this machine to a run until it ends; the exit code."""
        ...

    def stop(self, run: str, *, now: bool = False, wait: bool = True) -> ListedRun:
        """Save a checkpoint and stop; ``now``: without saving."""
        ...

    def pause(self, run: str) -> ListedRun:
        """Save a checkpoint and release the devices of a run of the pool."""
        ...

    def ps(self, *, most: int | None = None) -> RunList:
        """List runs, newest first: so many, and all that are active."""
        ...

    def run(self, run: str) -> ListedRun:
        """State and progress of one run."""
        ...

    def show(self, run: str) -> RunDetails:
        """State, plan, workers, evaluations, checkpoints, warnings and paths of one run."""
        ...

    def events(self, run: str, *, since: LogCursor | None = None) -> RunUpdate:
        """Events so far."""
        ...

    def follow(self, run: str, *, since: LogCursor | None = None) -> Iterator[RunUpdate]:
        """Events and metrics as they come, until the run is no longer active."""
        ...

    def logs(
        self,
        run: str,
        *,
        rank: int | None = None,
        worker: str | None = None,
        lines: int | None = None,
        since: int | None = None,
    ) -> LogText:
        """Text output of a run, or of one of its workers."""
        ...

    def failure(self, run: str) -> RunFailure | None:
        """Why a run failed or was lost; None where it did not, or does not say."""
        ...

    def report(self, run: str) -> Report:
        """Build and write the report of a run."""
        ...

    def report_page(self, run: str) -> ReportPage:
        """Page of the report that was written last."""
        ...

    def plan_removal(self, runs: Sequence[str]) -> CleanupPlan:
        """What removing these runs would remove; refused where one is alive, needed, or not ours."""
        ...

    def plan_prune(self, *, older: str = "30d", keep_best: bool = False) -> CleanupPlan:
        """What is older than a span and no longer needed; nothing is removed yet."""
        ...

    def clean_up(self, plan: CleanupPlan) -> CleanupResult:
        """Remove what a plan lists, as far as it is still not needed."""
        ...

    def disk_usage(self) -> DiskUsage:
        """Who takes the space: runs, checkpoints, caches, data sets."""
        ...


class PoolVerbs(Protocol):
    """The pool: devices shared by queued runs."""

    def submit(
        self,
        job: Job,
        *,
        source: Path | None = None,
        plan: Plan | None = None,
        priority: int = 0,
        team: str = "",
        min_devices: int | None = None,
        max_devices: int | None = None,
        deadline: str | None = None,
        budget: float | None = None,
        rehearse: bool = True,
    ) -> QueuedRun:
        """Queue a job; with a ``plan`` as in ``train``.

        A step of it is rehearsed first where the pool runs on other machines, unless ``rehearse`` is false.
        """
        ...

    def pool(self) -> PoolView:
        """Nodes, queue, who holds which devices."""
        ...

    def pool_up(
        self,
        *,
        executor: str = "local",
        policy: str = "yunlu",
        round_s: float = 30.0,
        quotas: Mapping[str, int] = {},
        borrow: Mapping[str, int] = {},
        weights: Mapping[str, float] = {},
        idle_s: float = 300.0,
        max_nodes: int | None = None,
        max_dollars_per_hour: float | None = None,
        team_dollars_per_hour: Mapping[str, float] = {},
        prices: Mapping[str, float] = {},
    ) -> PoolUp:
        """Start the service of the pool; without any option, as it was last up."""
        ...

    def pool_down(self, *, stop_jobs: bool = False) -> PoolDown:
        """End the service of the pool."""
        ...

    def pool_why(self, run: str) -> Explanation:
        """Explain what the pool decided on a run."""
        ...

    def pool_change(
        self,
        run: str,
        *,
        priority: int | None = None,
        deadline: str | None = None,
        budget: str | None = None,
        min_devices: int | None = None,
        max_devices: int | None = None,
    ) -> QueueEntry:
        """Change priority, deadline, budget or devices of a queued run."""
        ...


class StudyVerbs(Protocol):
    """Studies: search for good settings of a job."""

    def tune(
        self,
        job: Job,
        *,
        name: str | None = None,
        source: str | None = None,
        overrides: Sequence[str] = (),
    ) -> StudyStart:
        """Create the study of a job, or open the one that exists."""
        ...

    def tune_again(
        self,
        name: str,
        *,
        trials: int | None = None,
        budget: float | None = None,
        deadline: str | None = None,
        parallel: int | None = None,
        devices: int | None = None,
    ) -> StudyStart:
        """Open a study to continue it, with other limits where some are given."""
        ...

    def run_study(
        self,
        name: str,
        *,
        on_change: Callable[[StudyView], None],
        should_stop: Callable[[], bool],
    ) -> StudyResult:
        """Run the trials of a study; returns when it ends or stops."""
        ...

    def forecast_study(self, job: Job, *, name: str | None = None) -> StudyOutlook:
        """Predict trials, time and cost of a study without starting it."""
        ...

    def studies(self) -> StudyList:
        """List studies, newest first."""
        ...

    def study(self, name: str) -> StudyView:
        """A study and its trials."""
        ...

    def stop_study(self, name: str) -> StoppedStudy:
        """Stop a running study; its trials save and can continue later."""
        ...

    def report_study(self, name: str, *, page: Path | None = None) -> StudyResult:
        """Write the report of a study."""
        ...


class MachineVerbs(Protocol):
    """Hardware: the catalog, and this machine."""

    def offers(
        self,
        *,
        gpu: str | None = None,
        cloud: str | None = None,
        region: str | None = None,
        spot: bool = False,
        max_price: float | None = None,
    ) -> tuple[ListedOffer, ...]:
        """Offers that match, cheapest device-hour first."""
        ...

    def offered_devices(self) -> tuple[OfferedDevice, ...]:
        """Devices that are offered, each with its cheapest offers."""
        ...

    def devices(self, *, gpu: str | None = None) -> tuple[ListedDevice, ...]:
        """Devices and their figures."""
        ...

    def device(self, name: str) -> DevicePage:
        """One device and its offers."""
        ...

    def update_catalog(
        self, source: Path, *, cloud: str | None = None
    ) -> tuple[ImportedTable, ...]:
        """Import prices from a SkyPilot catalog."""
        ...

    def add_to_catalog(self, file: Path) -> Additions:
        """Add devices, prices and own machines from a YAML file."""
        ...

    def remove_from_catalog(self, names: Sequence[str]) -> tuple[str, ...]:
        """Remove added entries or imported clouds; what each was."""
        ...

    def compare_ownership(
        self, machine: str, *, against: str | None = None, spot: bool = False
    ) -> OwnershipPage:
        """Compare an own machine with renting."""
        ...

    def doctor(self) -> MachineFindings:
        """Examine this machine: what it has, what is missing."""
        ...

    def selftest(
        self,
        *,
        quick: bool = False,
        devices: int | None = None,
        checks: Sequence[str] = (),
        on_progress: Callable[[SelftestProgress], None] | None = None,
    ) -> SelftestResult:
        """Train small jobs here, ten minutes at most: same losses as on the CPU, every layout, a kill, a resume.

        ``checks``: only these, by name. What fails is in the result, with the end of its log.
        """
        ...

    def probe(
        self,
        *,
        show: bool = False,
        afresh: bool = False,
        on_progress: Callable[[ProbeProgress], None] | None = None,
    ) -> ProbeResult:
        """Measure this machine, or return stored figures."""
        ...

    def forget(self, *, all_: bool = False) -> ForgottenRuns:
        """Drop what deleted runs taught about this machine; ``all_``: everything."""
        ...


class Client(JobVerbs, RunVerbs, PoolVerbs, StudyVerbs, MachineVerbs, Protocol):
    """Everything that a user can ask for."""
