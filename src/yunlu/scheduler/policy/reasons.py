"""Why a job gets what it gets, in a word for machines and a sentence for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.scheduler.policy.values import Reason

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Placement
    from yunlu.scheduler.policy.fairness import TeamQuota
    from yunlu.scheduler.policy.values import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedJob:
    """What was decided about one job."""

    job: Demand
    gets: Placement
    speedup: float
    """How many times faster than before it will be; 1 where nothing changes."""
    left_s: float
    least: int
    """The fewest devices it can run on here; 0 is none at all."""
    is_moved: bool
    """As many devices as before, but elsewhere, to make room."""
    is_bereft: bool
    """A machine that it was on is gone."""
    is_unplaced: bool
    misses_deadline: bool
    free: int
    """Devices that nobody holds after the decision."""
    capacity: int
    allowance: TeamQuota | None
    team_holds: int
    starts_at: float | None
    """When it will probably start, if it waits."""


class LazyReasons(Mapping[str, Reason]):
    """Reasons that are put into words when somebody asks: most rounds nobody does."""

    def __init__(self, jobs: Sequence[str], tell: Callable[[int], Reason]) -> None:
        """``tell`` is given the number of a job."""
        self._rows = {job: row for row, job in enumerate(jobs)}
        self._tell = tell

    def __getitem__(self, job: str) -> Reason:
        """Why this job gets what it gets."""
        return self._tell(self._rows[job])

    def __iter__(self) -> Iterator[str]:
        """Every job."""
        return iter(self._rows)

    def __len__(self) -> int:
        """How many."""
        return len(self._rows)


def explain_job(case: ExplainedJob) -> Reason:
    """The binding reason; what would unblock a job that waits is in its text."""
    figures: dict[str, object] = {"devices": case.gets.devices, "held": case.job.held.devices}
    if case.gets:
        code, text = _explain_running(case)
        figures["left_s"] = case.left_s
        if case.speedup != 1.0:
            figures["speedup"] = case.speedup
    else:
        code, text = _explain_waiting(case)
        figures["needs"] = case.least
        if case.starts_at is not None:
            figures["starts_at"] = case.starts_at
    if case.misses_deadline:
        figures["misses_deadline"] = True
        text += " It will probably miss its deadline."
    return Reason(code=code, text=text, figures=figures)


def _explain_running(case: ExplainedJob) -> tuple[str, str]:
    job, devices = case.job, case.gets.devices
    if job.is_pinned:
        return "pinned", f"It keeps its {_count(devices)}: it is being moved, or asked to stay."
    if not job.held:
        return "started", f"It starts on {_count(devices)}, the best use of them for the pool."
    return _explain_change(case)


def _explain_change(case: ExplainedJob) -> tuple[str, str]:
    job, devices, had = case.job, case.gets.devices, case.job.held.devices
    if case.is_bereft:
        return "moved", f"It goes on with {_count(devices)}: a machine that it was on is gone."
    if devices > had:
        return "grown", (
            f"It grows from {had} to {_count(devices)}: {case.speedup:.2f} times as fast, "
            "worth the restart."
        )
    if devices < had:
        return "shrunk", (
            f"It shrinks from {had} to {_count(devices)}: others make more progress with the rest."
        )
    if case.is_moved or case.gets != job.held:
        return "moved", (
            f"It keeps {_count(devices)} but moves, so that free devices lie together."
        )
    return "kept", f"It keeps its {_count(devices)}: no change would be worth a restart."


def _explain_waiting(case: ExplainedJob) -> tuple[str, str]:
    job, least = case.job, case.least
    if job.budget_dollars is not None and job.budget_dollars <= 0:
        return "over_budget", "Its budget is spent. Raise it to go on."
    if least <= 0 and job.min_devices > case.capacity:
        return "too_large", (
            f"It needs at least {_count(job.min_devices)}; the pool has {case.capacity}. "
            "Lower its minimum or add nodes."
        )
    if least <= 0:
        return "cannot_run", "No number of devices of this pool suits its limits and its batch."
    one = case.allowance
    if one is not None and case.team_holds + least > one.most:
        return "over_quota", (
            f"Its team holds {case.team_holds} of at most {_count(one.most)}. "
            "It starts when a job of the team ends, or its quota is raised."
        )
    if case.is_unplaced or case.free >= least:
        return "fragmented", (
            f"{_count(case.free)} are free, but not where {least} could be used together."
        )
    stopped = "It was stopped and saved; " if job.held else ""
    return ("stopped" if job.held else "waits_for_devices"), (
        f"{stopped or 'It waits: '}jobs that are nearer to their end, or go before it, hold "
        f"all {_count(case.capacity)}. It needs {least}."
    )


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
