"""Studies of this machine."""
# ruff: noqa: PLC0415 (a verb imports only what it needs: Optuna is slow to import)

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from yunlu.core.errors import StoreError, YunluError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.tuning.facts import StudyView
    from yunlu.tuning.session import (
        StoppedStudy,
        StudyList,
        StudyOutlook,
        StudyResult,
        StudyStart,
    )


class LocalStudies:
    """As ``StudyVerbs``."""

    def tune(
        self,
        job: Job,
        *,
        name: str | None = None,
        source: str | None = None,
        overrides: Sequence[str] = (),
    ) -> StudyStart:
        """As ``StudyVerbs.tune``."""
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
        """As ``StudyVerbs.tune_again``."""
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
        """As ``StudyVerbs.run_study``; the report is written whatever happens."""
        from yunlu.tuning.session import StudyResult, run_study
        from yunlu.tuning.view import read_view

        try:
            view = run_study(name, on_change=on_change, should_stop=should_stop)
        except YunluError:
            _try_reports(read_view(name))
            raise
        return StudyResult(view=view, report=_try_reports(view))

    def forecast_study(self, job: Job, *, name: str | None = None) -> StudyOutlook:
        """As ``StudyVerbs.forecast_study``."""
        from yunlu.tuning.session import forecast_study

        return forecast_study(job, name=name)

    def studies(self) -> StudyList:
        """As ``StudyVerbs.studies``."""
        from yunlu.tuning.session import list_views

        return list_views()

    def study(self, name: str) -> StudyView:
        """As ``StudyVerbs.study``."""
        from yunlu.tuning.view import read_view

        return read_view(name)

    def stop_study(self, name: str) -> StoppedStudy:
        """As ``StudyVerbs.stop_study``."""
        from yunlu.tuning.session import stop_study

        return stop_study(name)

    def report_study(self, name: str, *, page: Path | None = None) -> StudyResult:
        """As ``StudyVerbs.report_study``."""
        from yunlu.render.study_report import write_report, write_run_reports
        from yunlu.tuning.session import StudyResult
        from yunlu.tuning.view import read_view

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
