"""The client of this machine: jobs, runs, studies, pool, catalog; calls the rooms below in this process."""
# ruff: noqa: D102, PLC0415 (what verbs do is said in protocol.py; each imports only what it needs: much is slow)

from __future__ import annotations

import os
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.client.protocol import JobVerbs, MachineVerbs, PoolVerbs, RunVerbs, StudyVerbs
from yunlu.core.errors import StoreError, YunluError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from yunlu.core.launch import LaunchInfo
    from yunlu.hardware.entries import Additions, MachineEntry
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
    from yunlu.runs.run_store import RunStore
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


class LocalJobs(JobVerbs):
    """Jobs and plans, read and made in this process."""

    def validate(self, job: str, *, overrides: Sequence[str] = ()) -> Validation:
        from yunlu.spec.load import check_job

        return check_job(job, overrides=overrides)

    def plan(self, job: Job, *, top: int = 3, candidates: bool = False) -> PlanOutcome:
        from yunlu.jobs.plan_options import search_options

        return search_options(job, top=top, everything=candidates)

    def measure(self, job: Job, *, on_event: Callable[[Event], None] | None = None) -> Plan:
        from yunlu.jobs import lifecycle

        return lifecycle.make_plan(job, on_event=on_event)

    def rehearse(self, job: Job, plan: Plan) -> Rehearsal:
        from yunlu.jobs import model_profile

        return model_profile.rehearse(job, plan)

    def load_plan(self, text: str) -> Plan:
        from yunlu.jobs.submitted_plan import load_plan

        return load_plan(text)

    def predict(self, table: Path) -> tuple[PredictedRow, ...]:
        from yunlu.jobs.predict_table import predict_file

        return predict_file(table)


class LocalRuns(RunVerbs):
    """Runs in the home of this user."""

    def train(
        self,
        job: Job,
        *,
        source: Path | None = None,
        plan: Plan | None = None,
        detach: bool = False,
    ) -> StartedRun:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.launch import find_launch, start_run
        from yunlu.jobs.submitted_plan import resolve_plan

        launch = find_launch(job, waits=not detach)
        if launch is not None and (followed := _follow_launch(launch)) is not None:
            return followed
        job, plan = resolve_plan(job, plan)
        if launch is not None:
            run = start_run(job, launch, source=source, plan=plan)
            return _started(run, is_launched=True)
        run = lifecycle.submit(job, source=source, plan=plan)
        with _stopped_if_interrupted(run):
            lifecycle.start(run)
            return _started(run)

    def finetune(
        self, start: str, job: str, *, overrides: Sequence[str] = (), detach: bool = False
    ) -> StartedRun:
        from yunlu.jobs.job_input import finetuning_job
        from yunlu.spec.load import source_of

        whole = finetuning_job(start, job, overrides)
        return self.train(whole, source=source_of(job), detach=detach)

    def resume(self, run: str, *, detach: bool = False) -> StartedRun:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.launch import find_launch, resume_run
        from yunlu.jobs.run_log import end_of
        from yunlu.scheduler.control import is_queued_again

        store = find_run(run)
        launch = find_launch(waits=not detach)
        if launch is not None:
            since = end_of(store)
            return _follow_launch(launch) or _started(resume_run(store), since, is_launched=True)
        if is_queued_again(store):
            return _started(store, is_queued=True)
        since = end_of(store)
        with _stopped_if_interrupted(store):
            lifecycle.resume(store)
            return _started(store, since)

    def resize(self, run: str, *, devices: int) -> WorkerResize:
        from yunlu.jobs.lifecycle import resize

        return resize(find_run(run), devices=devices)

    def find_group(self, host: str, port: int, token: str, *, name: str | None) -> JoinTarget:
        from yunlu.executors.worker_process import find_run as find_supervised
        from yunlu.executors.worker_process import node_command
        from yunlu.jobs.run_view import JoinTarget
        from yunlu.runs.worker_group import LOCAL, read_worker_group

        if name == LOCAL:
            raise StoreError(
                f"{LOCAL!r} is the name of the run's own node", hint="give another --name, or none"
            )
        run = find_supervised(host, port, token)
        group = read_worker_group(run)
        if group is None:
            raise StoreError(
                f"{run.address}, the directory of the run, cannot be read on this machine",
                hint="share it between the machines, at the same path and for the same user",
            )
        node_command(run, group)  # refused before anything is promised
        node = name or f"{socket.gethostname()}-{os.getpid()}"
        if node in group.wanted:
            raise StoreError(
                f"{run.id} has a node called {node!r} already", hint="give another --name"
            )
        return JoinTarget(run=run.id, dir=run.address, node=node)

    def join(self, target: JoinTarget, *, devices: int) -> int:
        from yunlu.executors.worker_process import run_node
        from yunlu.runs.home import open_run

        return run_node(open_run(target.dir), name=target.node, devices=devices)

    def stop(self, run: str, *, now: bool = False, wait: bool = True) -> ListedRun:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run
        from yunlu.scheduler.queue import withdraw

        store = find_run(run)
        if not wait:
            return list_run(store, lifecycle.request_stop(store, now=now))
        withdraw(store)  # else the pool would start it again
        return list_run(store, lifecycle.stop(store, now=now))

    def pause(self, run: str) -> ListedRun:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run
        from yunlu.scheduler import queue

        store = find_run(run)
        queue.pause(store)
        return list_run(store, lifecycle.stop(store))

    def ps(self, *, most: int | None = None) -> RunList:
        from yunlu.core.settings import read_settings
        from yunlu.jobs.run_listing import list_home

        return list_home(read_settings().home, most=most)

    def run(self, run: str) -> ListedRun:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run

        store = find_run(run)
        return list_run(store, lifecycle.read_record(store))

    def show(self, run: str) -> RunDetails:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import describe_run

        store = find_run(run)
        return describe_run(store, lifecycle.read_record(store))

    def events(self, run: str, *, since: LogCursor | None = None) -> RunUpdate:
        from yunlu.jobs.run_view import read_update

        return read_update(find_run(run), since=since)

    def follow(self, run: str, *, since: LogCursor | None = None) -> Iterator[RunUpdate]:
        from yunlu.jobs.run_log import follow

        yield from follow(find_run(run), since=since)

    def logs(
        self,
        run: str,
        *,
        rank: int | None = None,
        worker: str | None = None,
        lines: int | None = None,
        since: int | None = None,
    ) -> LogText:
        from yunlu.jobs.run_view import read_text_log

        return read_text_log(find_run(run), rank=rank, worker=worker, lines=lines, since=since)

    def failure(self, run: str) -> RunFailure | None:
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import find_failure

        store = find_run(run)
        return find_failure(store, lifecycle.read_record(store).state)

    def report(self, run: str) -> Report:
        from yunlu.render.run_report import write_report

        return write_report(find_run(run))

    def report_page(self, run: str) -> ReportPage:
        from yunlu.render.run_report import find_page

        return find_page(find_run(run))

    def plan_removal(self, runs: Sequence[str]) -> CleanupPlan:
        from yunlu.client.holds import HoldFinder
        from yunlu.jobs.cleanup import plan_removal

        return plan_removal([find_run(run) for run in runs], find_hold=HoldFinder())

    def plan_prune(self, *, older: str = "30d", keep_best: bool = False) -> CleanupPlan:
        from yunlu.client.holds import HoldFinder
        from yunlu.jobs.cleanup import plan_prune

        return plan_prune(older=older, keep_best=keep_best, find_hold=HoldFinder())

    def clean_up(self, plan: CleanupPlan) -> CleanupResult:
        from yunlu.client.holds import HoldFinder
        from yunlu.jobs.cleanup import remove

        return remove(plan, find_hold=HoldFinder())

    def disk_usage(self) -> DiskUsage:
        from yunlu.jobs.space import measure_space

        return measure_space()


def _rehearsal_note(job: Job, plan: Plan | None) -> str:
    """What a rehearsal has to say before the job is queued for other machines; raises the job's errors."""
    from yunlu.jobs import lifecycle
    from yunlu.jobs.submission_check import check_before_paying
    from yunlu.scheduler.pool_store import PoolStore

    settings = PoolStore(lifecycle.home()).read_settings()
    return "" if settings is None else check_before_paying(job, plan, executor=settings.executor)


def find_run(run: str) -> RunStore:
    """The run of an id, a unique prefix, ``last``, or a directory."""
    from yunlu.jobs import lifecycle
    from yunlu.runs.home import open_run
    from yunlu.runs.run_store import Document, Log

    path = Path(run).expanduser()
    if path.is_dir():
        store = open_run(path.resolve())
        if store.has(Document.JOB) or store.has(Log.EVENTS):
            return store
    return lifecycle.find(run)


@contextmanager
def _stopped_if_interrupted(run: RunStore) -> Generator[None]:
    """Ctrl-C before anybody watches the run: it must not go on unseen."""
    from yunlu.jobs import lifecycle

    try:
        yield
    except KeyboardInterrupt:
        with suppress(YunluError):
            lifecycle.request_stop(run)
        raise


def _follow_launch(launch: LaunchInfo) -> StartedRun | None:
    """On every rank but 0: train to the end."""
    from yunlu.jobs.launch import join_run
    from yunlu.jobs.run_view import StartedRun

    if not launch.rank:
        return None
    run, code = join_run()
    if run is None:
        return StartedRun(id="", dir="", task="", is_launched=True, exit_code=code)
    return _started(run, is_launched=True).model_copy(update={"exit_code": code})


def _started(
    run: RunStore,
    since: LogCursor | None = None,
    *,
    is_queued: bool = False,
    is_launched: bool = False,
) -> StartedRun:
    from yunlu.jobs.run import new_record
    from yunlu.jobs.run_log import LogCursor
    from yunlu.jobs.run_view import StartedRun

    record = new_record(run)
    return StartedRun(
        id=run.id,
        dir=run.address,
        task=record.task if record is not None else "",
        cursor=since or LogCursor(),
        is_queued=is_queued,
        is_launched=is_launched,
    )


class LocalStudies(StudyVerbs):
    """Studies in the home of this user, run by this process."""

    def tune(
        self,
        job: Job,
        *,
        name: str | None = None,
        source: str | None = None,
        overrides: Sequence[str] = (),
    ) -> StudyStart:
        from yunlu.tuning.session import start_study

        return start_study(job, name=name, source=source, overrides=overrides)

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
        from yunlu.tuning.session import continue_study

        limits = {"trials": trials, "budget": budget, "deadline": deadline, "parallel": parallel}
        return continue_study(name, {**limits, "devices": devices})

    def run_study(
        self,
        name: str,
        *,
        on_change: Callable[[StudyView], None],
        should_stop: Callable[[], bool],
    ) -> StudyResult:
        from yunlu.tuning.records import read_view
        from yunlu.tuning.session import StudyResult, run_study

        try:  # the report is written whatever happens
            view = run_study(name, on_change=on_change, should_stop=should_stop)
        except YunluError:
            _try_reports(read_view(name))
            raise
        return StudyResult(view=view, report=_try_reports(view))

    def forecast_study(self, job: Job, *, name: str | None = None) -> StudyOutlook:
        from yunlu.tuning.session import forecast_study

        return forecast_study(job, name=name)

    def studies(self) -> StudyList:
        from yunlu.tuning.session import list_views

        return list_views()

    def study(self, name: str) -> StudyView:
        from yunlu.tuning.records import read_view

        return read_view(name)

    def stop_study(self, name: str) -> StoppedStudy:
        from yunlu.tuning.session import stop_study

        return stop_study(name)

    def report_study(self, name: str, *, page: Path | None = None) -> StudyResult:
        from yunlu.render.study_report import write_report, write_run_reports
        from yunlu.tuning.records import read_view
        from yunlu.tuning.session import StudyResult

        view = read_view(name)
        if page is not None and not page.absolute().parent.is_dir():
            raise StoreError(f"--html: there is no directory {page.absolute().parent}.")
        write_run_reports(view)
        return StudyResult(view=view, report=str(write_report(view, page)))


def _try_reports(view: StudyView) -> str | None:
    """Write the pages of the study and its runs; the study is worth more than they are."""
    from yunlu.render.study_report import write_report, write_run_reports

    with suppress(OSError, YunluError):
        write_run_reports(view)
        return str(write_report(view))
    return None


_LOOK_S, _LOOK_AFAR_S = 1.0, 3.0
"""Seconds between two observations of the runs on this machine, and on a cluster."""


class LocalPool(PoolVerbs):
    """The pool of this home."""

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
        from yunlu.jobs import lifecycle
        from yunlu.jobs.submitted_plan import resolve_plan
        from yunlu.scheduler.pool_view import view_submitted
        from yunlu.scheduler.queue import enqueue, read_options

        options = read_options(
            priority=priority,
            team=team,
            min_devices=min_devices,
            max_devices=max_devices,
            deadline=deadline,
            budget_dollars=budget,
        )
        chosen = plan
        job, plan = resolve_plan(job, plan)
        note = _rehearsal_note(job, chosen) if rehearse else ""
        run = enqueue(job, options, source=source, plan=plan)
        return view_submitted(lifecycle.home(), run).model_copy(update={"rehearsal_note": note})

    def pool(self) -> PoolView:
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import view_pool

        return view_pool(lifecycle.home())

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
        from yunlu.core.settings import read_settings
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_store import PoolSettings
        from yunlu.scheduler.pool_view import start_pool

        settings = PoolSettings(
            executor=executor,
            policy=policy,
            round_s=round_s,
            look_s=_LOOK_S if executor.startswith("local") else _LOOK_AFAR_S,
            quotas=dict(quotas),
            borrow=dict(borrow),
            weights=dict(weights),
            team_dollars_per_hour=dict(team_dollars_per_hour),
            prices=dict(prices),
            idle_s=idle_s,
            max_nodes=max_nodes,
            max_dollars_per_hour=max_dollars_per_hour,
            dollars_per_hour=read_settings().dollars_per_hour,
        )
        return start_pool(lifecycle.home(), settings)

    def pool_down(self, *, stop_jobs: bool = False) -> PoolDown:
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import stop_pool

        return stop_pool(lifecycle.home(), stop_jobs=stop_jobs)

    def pool_why(self, run: str) -> Explanation:
        from yunlu.jobs import lifecycle
        from yunlu.scheduler.pool_view import explain

        return explain(lifecycle.home(), find_run(run))

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
        from yunlu.scheduler.queue import change_terms

        return change_terms(
            find_run(run),
            priority=priority,
            deadline=deadline,
            budget=budget,
            min_devices=min_devices,
            max_devices=max_devices,
        )


class LocalMachine(MachineVerbs):
    """The catalog of this user, and this machine."""

    def offers(
        self,
        *,
        gpu: str | None = None,
        cloud: str | None = None,
        region: str | None = None,
        spot: bool = False,
        max_price: float | None = None,
    ) -> tuple[ListedOffer, ...]:
        from yunlu.hardware.listing import list_offers
        from yunlu.jobs.catalog_store import open_catalog

        return list_offers(
            open_catalog(), gpu=gpu, cloud=cloud, region=region, spot=spot, max_price=max_price
        )

    def offered_devices(self) -> tuple[OfferedDevice, ...]:
        from yunlu.hardware.listing import list_offered_devices
        from yunlu.jobs.catalog_store import open_catalog

        return list_offered_devices(open_catalog())

    def devices(self, *, gpu: str | None = None) -> tuple[ListedDevice, ...]:
        from yunlu.hardware.listing import list_devices
        from yunlu.jobs.catalog_store import open_catalog

        return list_devices(open_catalog(), gpu)

    def device(self, name: str) -> DevicePage:
        from yunlu.hardware.listing import make_device_page
        from yunlu.jobs.catalog_store import open_catalog

        return make_device_page(open_catalog(), name)

    def update_catalog(
        self, source: Path, *, cloud: str | None = None
    ) -> tuple[ImportedTable, ...]:
        from yunlu.hardware.listing import ImportedTable
        from yunlu.jobs import catalog_store

        return tuple(
            ImportedTable(
                path=str(table.path),
                cloud=table.cloud,
                rows=table.imported.rows,
                offers=len(table.imported.offers),
                skipped=dict(table.imported.skipped.most_common()),
                home=str(catalog_store.home()),
            )
            for table in catalog_store.update(source, cloud=cloud)
        )

    def add_to_catalog(self, file: Path) -> Additions:
        from yunlu.jobs import catalog_store

        return catalog_store.add(file)

    def remove_from_catalog(self, names: Sequence[str]) -> tuple[str, ...]:
        from yunlu.hardware.catalog import CatalogError
        from yunlu.jobs import catalog_store

        if not names:
            added = [*catalog_store.read_added().names, *catalog_store.imported_clouds()]
            listing = ", ".join(added) or "nothing was added yet"
            raise CatalogError(f"Say what to remove: {listing}.")
        return tuple(catalog_store.remove(name) for name in names)

    def compare_ownership(
        self, machine: str, *, against: str | None = None, spot: bool = False
    ) -> OwnershipPage:
        from yunlu.hardware.listing import compare_ownership
        from yunlu.jobs.catalog_store import open_catalog

        catalog = open_catalog()
        return compare_ownership(catalog, _find_machine(machine), against=against, spot=spot)

    def doctor(self) -> MachineFindings:
        from yunlu.jobs.doctor import examine_machine

        return examine_machine()

    def probe(
        self,
        *,
        show: bool = False,
        afresh: bool = False,
        on_progress: Callable[[ProbeProgress], None] | None = None,
    ) -> ProbeResult:
        from yunlu.jobs.calibration import probe_machine

        return probe_machine(show=show, afresh=afresh, on_progress=on_progress)

    def forget(self, *, all_: bool = False) -> ForgottenRuns:
        from yunlu.jobs.calibration import forget_runs

        return forget_runs(all_=all_)


def _find_machine(text: str) -> MachineEntry:
    """The machine of a YAML file, or one that was added."""
    from yunlu.hardware.catalog import CatalogError
    from yunlu.jobs import catalog_store

    path = Path(text)
    if not path.is_file():
        if path.suffix in {".yaml", ".yml", ".json"}:
            raise CatalogError(f"There is no file {path}.")
        return catalog_store.find_machine(text)
    machines = catalog_store.read_file(path).machines
    if len(machines) != 1:
        raise CatalogError(
            f"{path} has {len(machines)} machines, not one.",
            hint="yunlu catalog add FILE, then yunlu catalog own NAME",
        )
    return machines[0]


class LocalClient(LocalJobs, LocalRuns, LocalPool, LocalStudies, LocalMachine):
    """Runs, pool, studies and catalog of the home directory that the settings name."""

    def selftest(
        self,
        *,
        quick: bool = False,
        devices: int | None = None,
        checks: Sequence[str] = (),
        on_progress: Callable[[SelftestProgress], None] | None = None,
    ) -> SelftestResult:
        """As ``MachineVerbs.selftest``: by the other verbs of this client."""
        from yunlu.jobs.selftest import run_selftest

        return run_selftest(
            self, quick=quick, devices=devices, checks=checks, on_progress=on_progress
        )
