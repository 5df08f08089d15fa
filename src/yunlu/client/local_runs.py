"""Jobs and runs of this machine."""
# ruff: noqa: PLC0415 (a verb imports only what it needs: arrays and databases are slow to import)

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.core.launch import LaunchInfo
    from yunlu.jobs.plan_options import PlanOutcome
    from yunlu.jobs.predict_table import PredictedRow
    from yunlu.jobs.report_model import Report, ReportPage
    from yunlu.jobs.resize import WorkerResize
    from yunlu.jobs.run_log import LogCursor, RunUpdate
    from yunlu.jobs.run_view import (
        JoinTarget,
        ListedRun,
        LogText,
        RunDetails,
        RunFailure,
        RunList,
        StartedRun,
    )
    from yunlu.planning.plan import Plan
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.spec.load import Validation


class LocalJobs:
    """As ``JobVerbs``."""

    def validate(self, job: str, *, overrides: Sequence[str] = ()) -> Validation:
        """As ``JobVerbs.validate``."""
        from yunlu.spec.load import check_job

        return check_job(job, overrides=overrides)

    def plan(self, job: Job, *, top: int = 3, candidates: bool = False) -> PlanOutcome:
        """As ``JobVerbs.plan``."""
        from yunlu.jobs.plan_options import search_options

        return search_options(job, top=top, everything=candidates)

    def measure(self, job: Job, *, on_event: Callable[[Event], None] | None = None) -> Plan:
        """As ``JobVerbs.measure``."""
        from yunlu.jobs import lifecycle

        return lifecycle.make_plan(job, on_event=on_event)

    def load_plan(self, text: str) -> Plan:
        """As ``JobVerbs.load_plan``."""
        from yunlu.jobs.submitted_plan import load_plan

        return load_plan(text)

    def predict(self, table: Path) -> tuple[PredictedRow, ...]:
        """As ``JobVerbs.predict``."""
        from yunlu.jobs.predict_table import predict_file

        return predict_file(table)


class LocalRuns:
    """As ``RunVerbs``."""

    def train(
        self,
        job: Job,
        *,
        source: Path | None = None,
        plan: Plan | None = None,
        detach: bool = False,
    ) -> StartedRun:
        """As ``RunVerbs.train``."""
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
        lifecycle.start(run)
        return _started(run)

    def finetune(
        self, start: str, job: str, *, overrides: Sequence[str] = (), detach: bool = False
    ) -> StartedRun:
        """As ``RunVerbs.finetune``."""
        from yunlu.client.finetuning import finetuning_job
        from yunlu.spec.load import source_of

        whole = finetuning_job(start, job, overrides)
        return self.train(whole, source=source_of(job), detach=detach)

    def resume(self, run: str, *, detach: bool = False) -> StartedRun:
        """As ``RunVerbs.resume``."""
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
        lifecycle.resume(store)
        return _started(store, since)

    def resize(self, run: str, *, devices: int) -> WorkerResize:
        """As ``RunVerbs.resize``."""
        from yunlu.jobs.resize import resize

        return resize(find_run(run), devices=devices)

    def find_group(self, host: str, port: int, token: str, *, name: str | None) -> JoinTarget:
        """As ``RunVerbs.find_group``."""
        from yunlu.executors.worker_group import find_run as find_supervised
        from yunlu.executors.worker_group import node_command
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
        """As ``RunVerbs.join``."""
        from yunlu.executors.worker_group import run_node
        from yunlu.runs.home import open_run

        return run_node(open_run(target.dir), name=target.node, devices=devices)

    def stop(self, run: str, *, now: bool = False, wait: bool = True) -> ListedRun:
        """As ``RunVerbs.stop``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run
        from yunlu.scheduler.queue import withdraw

        store = find_run(run)
        if not wait:
            return list_run(store, lifecycle.request_stop(store, now=now))
        withdraw(store)  # else the pool would start it again
        return list_run(store, lifecycle.stop(store, now=now))

    def pause(self, run: str) -> ListedRun:
        """As ``RunVerbs.pause``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run
        from yunlu.scheduler import queue

        store = find_run(run)
        queue.pause(store)
        return list_run(store, lifecycle.stop(store))

    def ps(self, *, most: int | None = None) -> RunList:
        """As ``RunVerbs.ps``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_records

        return list_records(lifecycle.home(), lifecycle.scan_runs(), most=most)

    def run(self, run: str) -> ListedRun:
        """As ``RunVerbs.run``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import list_run

        store = find_run(run)
        return list_run(store, lifecycle.read_record(store))

    def show(self, run: str) -> RunDetails:
        """As ``RunVerbs.show``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import describe_run

        store = find_run(run)
        return describe_run(store, lifecycle.read_record(store))

    def events(self, run: str, *, since: LogCursor | None = None) -> RunUpdate:
        """As ``RunVerbs.events``."""
        from yunlu.jobs.run_view import read_update

        return read_update(find_run(run), since=since)

    def follow(self, run: str, *, since: LogCursor | None = None) -> Iterator[RunUpdate]:
        """As ``RunVerbs.follow``."""
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
        """As ``RunVerbs.logs``."""
        from yunlu.jobs.run_view import read_text_log

        return read_text_log(find_run(run), rank=rank, worker=worker, lines=lines, since=since)

    def failure(self, run: str) -> RunFailure | None:
        """As ``RunVerbs.failure``."""
        from yunlu.jobs import lifecycle
        from yunlu.jobs.run_view import find_failure

        store = find_run(run)
        return find_failure(store, lifecycle.read_record(store).state)

    def report(self, run: str) -> Report:
        """As ``RunVerbs.report``."""
        from yunlu.render.run_report import write_report

        return write_report(find_run(run))

    def report_page(self, run: str) -> ReportPage:
        """As ``RunVerbs.report_page``."""
        from yunlu.render.run_report import find_page

        return find_page(find_run(run))


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
