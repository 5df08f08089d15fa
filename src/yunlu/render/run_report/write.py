"""``report.json`` and ``report.html`` in a run's directory."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError
from yunlu.core.settings import read_settings
from yunlu.jobs.report_builder import build_report
from yunlu.render.run_report.page import render_page
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from yunlu.jobs.report_model import Report
    from yunlu.runs.run_store import RunStore


def write_report(run: RunStore) -> Report:
    """Build the report and publish ``report.json`` and ``report.html`` in the run's directory."""
    report = build_report(run)
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
