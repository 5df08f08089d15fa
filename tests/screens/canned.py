"""A client whose every answer is written down: what commands show depends on nothing but the code.

Clocks, machines, prices and paths are made up; runs and studies come from the writers of other tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.sample_events import sample
from tests.unit.jobs import test_report_builder as written
from tests.unit.jobs.test_worker_groups import write_group_run
from tests.unit.tuning.made_studies import make_living, make_study
from yunlu.client.local import LocalClient
from yunlu.core.disk_usage import DiskSize
from yunlu.hardware.fleet import Device, Machine, PrecisionSpeed
from yunlu.jobs.accelerator_facts import AcceleratorFacts, DriverFacts
from yunlu.jobs.calibration import ForgottenRuns, LearntFactor, ProbeResult
from yunlu.jobs.cleanup import (
    CleanupPlan,
    CleanupResult,
    RemovableItem,
    RetainedRun,
    SkippedItem,
)
from yunlu.jobs.doctor import (
    AcceleratorProblem,
    DeviceSpeeds,
    MachineFindings,
    OptionalPart,
    StoreState,
    TorchState,
)
from yunlu.jobs.lifecycle import WorkerResize
from yunlu.jobs.plan_options import PlanOutcome
from yunlu.jobs.predict_table import PredictedRow
from yunlu.jobs.run_log import LogCursor, MetricRecord, RunUpdate
from yunlu.jobs.run_record import ListedRun, RunList
from yunlu.jobs.run_view import JoinTarget, LogText, RunDetails, StartedRun
from yunlu.jobs.selftest import SelftestCheck, SelftestFigures, SelftestResult
from yunlu.jobs.space import DiskUsage, RunSpace, SpaceShare
from yunlu.planning.machine_profile import (
    DiskFigures,
    KernelTiming,
    Kind,
    LinkFigures,
    MachineProfile,
    MessageTime,
    StartFigures,
)
from yunlu.planning.plan import Plan, RankRehearsal, Rehearsal
from yunlu.planning.search.options import PlanOptions
from yunlu.runs.events import (
    CheckpointSaved,
    DataOpened,
    Evaluated,
    MemoryExhausted,
    ModelBuilt,
    PlanMade,
    ProgressReported,
    StateChanged,
    StepSkipped,
    WarningRaised,
)
from yunlu.runs.states import RunState
from yunlu.scheduler.pool_store import PoolSettings
from yunlu.scheduler.pool_view import (
    Explanation,
    LoggedDecision,
    PoolDown,
    PoolNode,
    PoolRun,
    PoolUp,
    PoolView,
    QueuedRun,
    RequestedNode,
)
from yunlu.scheduler.queue import QueueEntry
from yunlu.scheduler.run_status import ResourceRequest
from yunlu.tuning.facts import StudyView
from yunlu.tuning.session import StoppedStudy, StudyList, StudyOutlook, StudyResult, StudyStart

NOW = 1_790_000_600.0
PROJECT = "/home/you/project"
HOME, CACHE = f"{PROJECT}/.yunlu", "/home/you/.cache/yunlu"
SIZES = (
    ("checkpoints", 1_258_291_200, 48),
    ("models", 104_857_600, 6),
    ("traces", 31_457_280, 19),
    ("made-data", 12_582_912, 680),
    ("own-data", 5_368_709_120, 100_000),
    ("run", 734_003_200, 214),
)
RUN = "python-docs-20260921-a1b2"
PLAN = Path(__file__).with_name("plan.json")
REASONS = {
    "device": ("cpu (AMD EPYC 7B13)", "no accelerator found; 2 cores, 22.9 GiB free"),
    "precision": ("fp32", "bf16 was 0.4 × as fast in two timed passes, and fp16 overflows here"),
    "micro-batch": ("32", "activations take 214.0 MiB of 13.3 GiB to spare"),
    "learning rate": ("0.001", "usual for adamw from scratch"),
    "checkpoint every": ("170 steps", "at most a minute of work is ever lost; a save takes 41 ms"),
}


def canned_options() -> PlanOptions:
    """Three options for a large model."""
    return PlanOptions.model_validate_json(PLAN.read_bytes())


def canned_plan() -> Plan:
    """What a worker decided on this machine."""
    choices = [
        {"name": name, "value": value, "reason": reason, "pinned": name == "micro-batch"}
        for name, (value, reason) in REASONS.items()
    ]
    keys = ("name", "value", "sample_s", "speedup", "is_adopted")
    trials = [("precision", "bf16", 0.1, 0.41, False), ("padding", "bucket", 0.05, 2.04, True)]
    plan: dict[str, Any] = written.plan_of(steps=1700, best_metric="loss") | {
        "choices": choices,
        "trials": [dict(zip(keys, trial, strict=True)) for trial in trials],
        "refinements": [
            {"name": "precision", "planned": "bf16", "refined": "fp32", "reason": "it is faster"}
        ],
    }
    return Plan.model_validate(plan)


def training_items() -> Iterator[Any]:
    """A training as its worker tells it: trouble, two evaluations, a checkpoint."""
    yield sample(StateChanged, at=NOW, state=RunState.PLANNING)
    yield sample(ProgressReported, at=NOW, phase="loading data")
    source = "examples/data/python-docs/*.txt"
    yield sample(DataOpened, at=NOW, source=source, train=81_200, validation=10_150, test=10_150)
    yield sample(ModelBuilt, at=NOW, name="transformer", parameters=10_400_000)
    yield PlanMade(at=NOW, plan=canned_plan())
    yield sample(StateChanged, at=NOW, state=RunState.RUNNING, resumed_from_step=120)
    warning = "the validation part has 40 samples only: its figures will jump from step to step"
    yield sample(WarningRaised, at=NOW, message=warning)
    for step in range(121, 1701):
        yield MetricRecord(
            record={
                "step": step, "epoch": step / 170, "loss": 6 * math.exp(-step / 500) + 1.3,
                "lr": 1e-3, "samples": 32 * step, "at": NOW + step / 100, "memory_bytes": 2**30,
            }
        )  # fmt: skip
        if step == 200:
            yield sample(StepSkipped, at=NOW, step=step, reason="spike", loss=14.2, norm=310.0)
            yield sample(MemoryExhausted, at=NOW, step=step, micro_batch=16)
        if step % 850 == 0:
            metrics = {"perplexity": 3.9, "accuracy": 0.61, "bits_per_byte": 1.72}
            yield sample(
                Evaluated, at=NOW, split="validation", step=step, loss=1.4, metrics=metrics
            )
            yield sample(CheckpointSaved, at=NOW, step=step, path=f"checkpoints/step-{step}")
    yield sample(StateChanged, at=NOW + 400, state=RunState.FINISHED)


class CannedClient(LocalClient):
    """Answers without looking at the machine; only the catalog and run directories are read."""

    home = Path()

    def train(self, job: Any, **options: Any) -> StartedRun:
        return self._start(RUN, queued=False)

    def finetune(self, start: str, job: str, **options: Any) -> StartedRun:
        return self._start(RUN, queued=False)

    def resume(self, run: str, **options: Any) -> StartedRun:
        return self._start(RUN, queued=run == "queued")

    def _start(self, run: str, *, queued: bool) -> StartedRun:
        path = self.home / run
        if not path.exists():
            written.write_classification(path)
        return StartedRun(id=run, dir=str(path), task="language-modeling", is_queued=queued)

    def follow(self, run: str, **options: Any) -> Iterator[RunUpdate]:
        yield RunUpdate(items=tuple(training_items()), cursor=LogCursor())

    def plan(self, job: Any, *, top: int = 3, **options: Any) -> PlanOutcome:
        found = canned_options()
        problems: dict[str, Any] = {}
        if job.goal.budget is not None:
            problem = (
                "goal.budget: nothing fits $0.05; the nearest, lambda gpu_8x_a100_80gb_sxm4 "
                "(8 x A100-80GB), costs $5.50 and takes 15 min."
            )
            advice = "To change: a budget of $5.50 would do; or train less, or a smaller model"
            note = "the network between nodes of aws:g6.xlarge is assumed, not published"
            problems = {"problems": (problem, advice), "notes": (note,)}
        options_ = found.model_copy(update={"options": found.options[:top], **problems})
        return PlanOutcome(options=options_, computed_s=0.05)

    def rehearse(self, job: Any, plan: Plan) -> Rehearsal:
        parts = {"weights": 589 << 20, "optimizer": 1178 << 20, "activations": 14 << 30}
        ranks = tuple(
            RankRehearsal(rank=rank, peak_bytes=29 << 30, phase="backward", parts=parts)
            for rank in (0, 4)
        )
        return Rehearsal(ranks=ranks, kernels="cuda", cpu_s=4.2, samples=8)

    def predict(self, table: Path) -> tuple[PredictedRow, ...]:
        figures = {
            "tokens_per_s_per_device": 6120.0, "tokens_per_s_per_device_p10": 4870.0,
            "tokens_per_s_per_device_p90": 7410.0, "step_time_s": 2.68,
            "peak_memory_bytes": 61e9, "peak_memory_bytes_p10": 52e9,
            "peak_memory_bytes_p90": 71e9, "fits": True,
        }  # fmt: skip
        reason = "there is no device 'Abacus'; yunlu catalog --devices lists them"
        return (
            PredictedRow.model_validate({"row": 0, "model": "llama-3.1-8b", **figures}),
            PredictedRow(row=1, model="llama-3.1-8b", reason=reason),
        )

    def measure(self, job: Any, *, on_event: Callable[[Any], None] | None = None) -> Plan:
        for item in training_items():
            if on_event is not None and isinstance(item, DataOpened | ModelBuilt):
                on_event(item)
        return canned_plan()

    def run(self, run: str) -> ListedRun:
        return self._listed(RUN, state=RunState.FINISHED)

    def _listed(self, run: str, **fields: Any) -> ListedRun:
        known = {
            "id": run, "name": "python-docs", "task": "language-modeling", "model": "transformer",
            "dir": str(self.home / run), "created_at": NOW - 7300.0, "step": 1020, "steps": 1700,
            "metric": "loss", "metric_value": 1.412,
        }  # fmt: skip
        return ListedRun.model_validate(known | fields)

    def ps(self, *, most: int | None = None) -> RunList:
        runs = (
            self._listed(RUN, state=RunState.RUNNING, eta_s=260.0, layout="dp2 x tp2", workers=4),
            self._listed(
                "digits-20260921-77aa", name="digits", task="image-classification", model="cnn",
                state=RunState.FINISHED, step=540, steps=540, metric="accuracy",
                metric_value=0.9889, created_at=NOW - 90_000.0,
            ),
            self._listed(
                "reviews-20260918-03fe", name="reviews", task="text-classification",
                model="hf:distilbert/distilbert-base-uncased", state=RunState.LOST, step=None,
                metric_value=None, created_at=NOW - 400_000.0,
                caution="the run belongs to user 1001: its state is what its files say",
            ),
        )  # fmt: skip
        problems = {"old-20250101-aaaa": "events.jsonl: line 3 is not JSON"}
        return RunList(home=str(self.home), runs=runs, older=41, problems=problems)

    def show(self, run: str) -> RunDetails:
        if run == "group":
            write_group_run(self.home / "group-run")
            return self._at_home(super().show("group-run"))
        self._start(RUN, queued=False)
        return self._at_home(super().show(RUN))

    def _at_home(self, details: RunDetails) -> RunDetails:
        return details.model_copy(update={"created_at": NOW - 7300.0})

    def events(self, run: str, **options: Any) -> RunUpdate:
        return RunUpdate(items=tuple(training_items()), cursor=LogCursor())

    def logs(self, run: str, **options: Any) -> LogText:
        return LogText(lines=("12:00:01 worker 0 is ready", "12:00:02 loaded 81,200 samples"))

    def report(self, run: str) -> Any:
        writers: dict[str, Callable[[Path], Any]] = {
            "failed": written.write_failed,
            "group": write_group_run,
            "tuned": written.write_tuned,
            RUN: written.write_classification,
        }
        name = RUN if run == "last" else run
        path = self.home / name
        if not path.exists():
            writers[name](path)
        return super().report(name)

    def report_page(self, run: str) -> Any:
        return super().report_page(RUN if run == "last" else run)

    def stop(self, run: str, **options: Any) -> ListedRun:
        return self._listed(RUN, state=RunState.STOPPED)

    def pause(self, run: str) -> ListedRun:
        return self._listed(RUN, state=RunState.STOPPED)

    def resize(self, run: str, *, devices: int) -> WorkerResize:
        return WorkerResize(text=f"{devices} workers from the next step on", layout="dp3")

    def find_group(self, host: str, port: int, token: str, *, name: str | None) -> JoinTarget:
        return JoinTarget(run=RUN, dir=str(self.home / RUN), node=name or "node-c")

    def join(self, target: JoinTarget, *, devices: int) -> int:
        return 0

    def submit(self, job: Any, **options: Any) -> QueuedRun:
        return QueuedRun(
            run=RUN, dir=str(self.home / RUN), pool_is_up=options["priority"] > 0, least=2,
            is_rigid=False, similar_team="vision",
            rehearsal_note="not rehearsed: the pool has no GPU whose kernels could be assumed",
        )  # fmt: skip

    def pool(self) -> PoolView:
        nodes = (
            PoolNode(
                name="gpu-node-01.cluster.example.org", type="a100", devices=8, held=8,
                dollars_per_hour=32.77, gpus=tuple((0.93 - 0.05 * i, 0.5) for i in range(8)),
            ),
            PoolNode(
                name="gpu-node-02.cluster.example.org", type="a100", devices=8, held=3,
                dollars_per_hour=9.80, is_spot=True, cpu=0.41, memory=0.22,
            ),
        )  # fmt: skip
        pending = (RequestedNode(kind="a100", devices=8, node="gpu-node-03", at=NOW + 180),)
        runs = (
            PoolRun(
                id=RUN, phase="running", state=RunState.RUNNING, priority=2, team="vision",
                devices=8, shares=(("gpu-node-01.cluster.example.org", 8),), wanted=11, least=2,
                most=16, submitted_at=NOW - 7000, deadline_at=NOW + 9000, progress=0.61,
                samples_per_s=12_400.0, cores=7.6, dollars=61.2, end_at=NOW + 4100,
            ),
            PoolRun(
                id="reviews-20260921-03fe", phase="waiting", state=RunState.PENDING, priority=0,
                team="speech", least=4, most=4, submitted_at=NOW - 600, devices=0, wanted=0,
                start_at=NOW + 4100, end_at=NOW + 9900, dollars=0.0,
            ),
        )  # fmt: skip
        return PoolView(
            is_up=True, pid=4242, at=NOW - 1, policy="yunlu", executor="slurm://gpu", nodes=nodes,
            pending_nodes=pending, devices=16, held=11, dollars_per_hour=42.57, runs=runs,
            limits="vision 8, up to 4 more; at most $60 an hour",
            troubles={"gpu-node-04": "does not answer since 12:01; its runs were moved"},
        )  # fmt: skip

    def pool_here(self) -> PoolView:
        """A machine that other programs keep busy."""
        node = PoolNode(name="laptop", type="cpu", devices=2, held=2, cpu=0.98, memory=0.61)
        first, second = (
            run.model_copy(
                update={
                    "devices": 1,
                    "wanted": 1,
                    "cores": cores,
                    "phase": "running",
                    "shares": (("laptop", 1),),
                    "start_at": None,
                }
            )
            for run, cores in zip(self.pool().runs, (0.31, 0.96), strict=True)
        )
        return PoolView(
            is_up=True, pid=4242, at=NOW - 60, policy="yunlu", executor="local", nodes=(node,),
            devices=2, held=2, runs=(first, second),
            machine={"cpu": 0.98, "memory": 0.61, "cores": 2.0, "other_cores": 0.69},
        )  # fmt: skip

    def pool_up(self, **options: Any) -> PoolUp:
        settings = PoolSettings(executor="slurm://gpu")
        return PoolUp(
            pid=4242, home=str(self.home), view=self.pool(), settings=settings, is_as_before=True
        )

    def pool_down(self, *, stop_jobs: bool = False) -> PoolDown:
        return PoolDown(was_up=True, stopped_jobs=stop_jobs)

    def pool_why(self, run: str) -> Explanation:
        decisions = (
            LoggedDecision(
                at=NOW - 900, code="wait", was=0, devices=0, figures={},
                text="waits: 4 devices are needed and 2 are free; python-docs ends first",
            ),
            LoggedDecision(
                at=NOW - 300, code="start", was=0, devices=4,
                text="starts: its 4 devices are worth more here than to python-docs, by 31 %",
                figures={"value": 0.31, "end_at": NOW + 9000, "goodput": 1240.5},
            ),
        )  # fmt: skip
        return Explanation(
            run=RUN, standing="running on 4 devices; ends in about 2 h 30 min",
            holders={RUN: 4, "reviews-20260921-03fe": 8}, history=decisions,
        )  # fmt: skip

    def pool_change(self, run: str, **options: Any) -> QueueEntry:
        request = ResourceRequest(least=2, most=16, requested=8)
        return QueueEntry(
            submitted_at=NOW, priority=3, request=request, deadline_at=NOW + 7200,
            budget_dollars=40.0,
        )  # fmt: skip

    def _study(self) -> StudyView:
        return make_study(self.home / "studies" / "digits-search")

    def studies(self) -> StudyList:
        other = make_living(self.home / "studies" / "reviews-search")
        other = other.model_copy(update={"name": "reviews-search"})
        damaged = ("old-search cannot be read: its storage is of another version",)
        return StudyList(home=str(self.home), studies=(self._study(), other), damaged=damaged)

    def study(self, name: str) -> StudyView:
        if name != "living":
            return self._study()
        return make_living(self.home / "studies" / "digits-search")

    def stop_study(self, name: str) -> StoppedStudy:
        return StoppedStudy(name="digits-search", was_running=name != "idle", active_runs=(RUN,))

    def report_study(self, name: str, *, page: Path | None = None) -> StudyResult:
        report = str(self.home / "studies" / "digits-search" / "report.html")
        return StudyResult(view=self._study(), report=report)

    def tune(self, job: Any, **options: Any) -> StudyStart:
        view = make_study(self.home / "studies" / "digits-search", 0, state="running", reason="")
        warning = (
            "weight decay may not carry over from the narrow model: search it on the whole one"
        )
        return StudyStart(view=view, devices=4, warnings=(warning,))

    def tune_again(self, name: str, **limits: Any) -> StudyStart:
        view = self._study().model_copy(update={"state": "running", "reason": ""})
        return StudyStart(view=view, devices=4)

    def run_study(self, name: str, *, on_change: Any, should_stop: Any) -> StudyResult:
        on_change(make_study(self.home / "studies" / "digits-search", 3, state="running"))
        return self.report_study(name)

    def forecast_study(self, job: Any, *, name: str | None = None) -> StudyOutlook:
        forecast = {
            "trials": {"value": 40.0, "low": 31.0, "high": 52.0},
            "seconds": {"value": 15_579.0 * 60, "low": 9_800.0 * 60, "high": 21_000.0 * 60},
            "dollars": {"value": 1234.5, "low": 900.0, "high": 1800.0},
            "notes": ["a whole training takes 6 h 40 min on one device (like run digits)"],
        }
        return StudyOutlook(
            study="digits-search", dimensions=6, rungs=9, devices=4, forecast=forecast
        )

    def disk_usage(self) -> DiskUsage:
        sizes = {name: DiskSize(bytes=size, files=files) for name, size, files in SIZES}
        run = RunSpace(
            id="python-docs-a1b2c3", state=RunState.FINISHED, updated_at=NOW - 3 * 86_400,
            checkpoints=DiskSize(bytes=629_145_600, files=24), model=sizes["models"], size=sizes["run"],
        )  # fmt: skip
        broken = RunSpace(
            id="reviews-d4e5f6", checkpoints=DiskSize(), model=DiskSize(), size=sizes["traces"]
        )
        shares = {
            "checkpoints": HOME, "models": HOME, "traces": HOME, "made-data": CACHE,
            "own-data": f"{PROJECT}/docs/a folder with a long name/of text files",
        }  # fmt: skip
        return DiskUsage(
            home=HOME, cache=CACHE, runs=(run, broken),
            shares=tuple(
                SpaceShare.model_validate({"kind": kind, "path": path, "size": sizes[kind]})
                for kind, path in shares.items()
            ),
        )  # fmt: skip

    def plan_removal(self, runs: Sequence[str]) -> CleanupPlan:
        item = RemovableItem(
            kind="run", path=f"{HOME}/python-docs-a1b2c3", run="python-docs-a1b2c3", reason="asked",
            size=DiskSize(bytes=734_003_200, files=214), used_at=NOW - 3 * 86_400,
        )  # fmt: skip
        return CleanupPlan(home=HOME, items=(item,), last_models=("python-docs",))

    def plan_prune(self, *, older: str = "30d", keep_best: bool = False) -> CleanupPlan:
        size = DiskSize(bytes=104_857_600, files=12)
        checkpoint = RemovableItem(
            kind="checkpoint", path=f"{HOME}/python-docs-a1b2c3/checkpoints/step-000000400",
            run="python-docs-a1b2c3", reason="superseded", size=size, used_at=NOW - 40 * 86_400,
        )  # fmt: skip
        failed = RemovableItem(
            kind="run", path=f"{HOME}/reviews-d4e5f6", run="reviews-d4e5f6", reason="failed",
            size=size, used_at=NOW - 90 * 86_400,
        )  # fmt: skip
        made = RemovableItem(
            kind="cache", path=f"{CACHE}/synthetic/spoken-digits", reason="unused", size=size,
            used_at=NOW - 60 * 86_400,
        )  # fmt: skip
        kept = RetainedRun(run="digits-0f0f0f", reason="used", by="digits-1a1a1a")
        return CleanupPlan(home=HOME, items=(checkpoint, failed, made), retained=(kept,))

    def clean_up(self, plan: CleanupPlan) -> CleanupResult:
        skipped = SkippedItem(
            path=f"{HOME}/digits-0f0f0f", problem="digits-0f0f0f has ended, but its worker has not"
        )
        return CleanupResult(removed=plan.items, skipped=(skipped,))

    def doctor(self) -> MachineFindings:
        gib = 1 << 30
        devices = (
            Device(kind="cuda", name="NVIDIA A100-SXM4-80GB", memory_bytes=79 * gib,
                   fast_precisions=("fp32", "bf16", "fp16")),
            Device(kind="cpu", name="AMD EPYC 7B13 64-Core Processor", memory_bytes=22 * gib),
        )  # fmt: skip
        speeds = (
            PrecisionSpeed(precision="fp32", relative_speed=1.0, is_worth_using=True, verdict=""),
            PrecisionSpeed(
                precision="bf16", relative_speed=7.6, is_worth_using=True, verdict="worth using"
            ),
            PrecisionSpeed(
                precision="fp8", relative_speed=0.2, is_worth_using=False,
                verdict="emulated on this device: slower than fp32",
            ),
        )  # fmt: skip
        driver = DriverFacts(
            maker="nvidia", title="NVIDIA GPU", kind="cuda", build="cuda", devices=2,
            version="570.86.15",
        )  # fmt: skip
        problem = AcceleratorProblem(
            title="NVIDIA GPU", problem="torch 2.13.0 was built without CUDA",
            advice="pip install torch --index-url https://download.example.org/whl/cu128",
        )  # fmt: skip
        parts = (
            OptionalPart(
                name="torch", purpose="training", version="2.13.0+cu128", install="pip install torch"
            ),
            OptionalPart(
                name="transformers", purpose="models and tokenizers of Hugging Face (hf:NAME)",
                version=None, install='pip install "yunlu[hf]"',
            ),
        )  # fmt: skip
        store = StoreState(path=str(self.home), exists=True, problem=None, free_bytes=310 * gib)
        return MachineFindings(
            machine=Machine(hostname="gpu-node-01", cores=16, memory_bytes=64 * gib, devices=devices),
            torch=TorchState(version="2.13.0", builds=("cuda",)),
            measured=DeviceSpeeds(device="NVIDIA A100-SXM4-80GB", precisions=speeds),
            yunlu="0.2.0", python="3.11.9", store=store,
            accelerators=AcceleratorFacts(drivers=(driver,), torch="2.13.0", builds=("cuda",)),
            accelerator_problems=(problem,), parts=parts, can_train=True, advice=(),
        )  # fmt: skip

    def probe(self, **options: Any) -> ProbeResult:
        sizes = (1e6, 1e8, 1e10)
        rates: dict[Kind, float] = {
            "product": 1.1e11, "convolution_back": 4e10, "stream": 2e10, "update": 6e9
        }  # fmt: skip
        paces = tuple(
            KernelTiming(
                kind=kind, threads=threads, sizes=sizes, spread=0.07,
                seconds=tuple(1e-6 + size / rate / threads for size in sizes),
            )
            for kind, rate in rates.items()
            for threads in (1, 2)
        )  # fmt: skip
        message = MessageTime(
            message_s=4e-5, bytes_per_s=1.2e9, sizes=(1.0, 1e6), seconds=(4e-5, 1e-3)
        )
        profile = MachineProfile(
            at=NOW, took_s=41.0, is_quick=True, host="gpu-node-01", kind="cpu",
            device="AMD EPYC 7B13 64-Core Processor", cores=2, memory_bytes=24 << 30, threads=2,
            torch="2.13.0", paces=paces, memory_bytes_per_s=1.9e10, call_s=4e-6, mixed=1.21,
            link=LinkFigures(backend="gloo", all_reduce=message, send=message),
            disk=DiskFigures(write_bytes_per_s=4.1e8, read_bytes_per_s=2.2e9),
            start=StartFigures(torch_s=1.9, worker_s=2.8, cpu_s=2.4, resident_bytes=3.1e8),
        )  # fmt: skip
        learnt = LearntFactor(runs=7, factor=1.12, sd_of_log=0.08)
        return ProbeResult(probed=profile, calibration=learnt)

    def forget(self, *, all_: bool = False) -> ForgottenRuns:
        return ForgottenRuns(forgotten=3)

    def selftest(self, **options: Any) -> SelftestResult:
        figures = SelftestFigures(
            memory_bytes=331e6, predicted_memory_bytes=340e6, step_s=0.049, predicted_step_s=0.045
        )
        checks = (
            SelftestCheck(
                name="text", outcome="ok", seconds=4.1, detail="loss 4.2 → 1.1", figures=figures
            ),
            SelftestCheck(
                name="fsdp+tp", layout="fsdp4 x tp2", outcome="failed", seconds=12.3,
                detail="step 2: loss 3.5, the CPU's 3.4 (2.9 % off, 0.1 % allowed)",
            ),
            SelftestCheck(name="bf16", outcome="skipped", detail="this npu does not compute in bf16"),
        )  # fmt: skip
        return SelftestResult(
            at=NOW, took_s=61.0, is_quick=False, yunlu="0.2.0", python="3.11.9", platform="Linux",
            packages={"torch": "2.13.0"}, kind="npu", device="Ascend910B2", devices=8,
            precisions=("fp32",), accelerators=AcceleratorFacts(), environment={}, checks=checks,
        )  # fmt: skip
