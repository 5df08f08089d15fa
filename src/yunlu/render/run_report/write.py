"""``report.json`` and ``report.html`` in a run's directory."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.settings import read_settings
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.report_model import ReportPage
from yunlu.render.run_report.page import render_page
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from yunlu.jobs.report_model import Report
    from yunlu.runs.run_store import RunStore


def find_page(run: RunStore) -> ReportPage:
    """The page that was written; that of another user's run is rendered anew, from its data alone."""
    if run.foreign_owner is not None:
        html = render_page(build_report(run), language=read_settings().language)
        return ReportPage(location="", html=html)
    content = run.read(Document.REPORT_PAGE)
    if content is None:
        raise StoreError(f"{run.id} has no report yet", hint=f"yunlu report {run.id} writes it")
    return ReportPage(
        location=str(run.location(Document.REPORT_PAGE)), html=content.decode("utf-8")
    )


def write_report(run: RunStore) -> Report:
    """Build the report and publish ``report.json`` and ``report.html`` in the run's directory.

    Nothing is written to the run of another user, and nothing is learnt from it.
    """
    report = build_report(run)
    if run.foreign_owner is not None:
        return report
    page = render_page(report, language=read_settings().language)
    try:
        run.write(Document.REPORT, report.model_dump_json() + "\n")
        run.write(Document.REPORT_PAGE, page)
    except OSError as error:
        raise StoreError(
            f"The report cannot be written to {run.address}: {error.strerror or error}.",
            hint="Free some space or give yourself write access; the run itself is unharmed.",
        ) from error
    if report.state is RunState.FINISHED:
        from yunlu.jobs.calibration import learn_from  # noqa: PLC0415 (arrays are slow to import)

        with suppress(OSError, StoreError):  # without a place for it, the next plan knows less
            learn_from([run])
    return report
