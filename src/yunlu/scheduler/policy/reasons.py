"""Why a job gets what it gets: a code for machines and a sentence for people."""

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
    """A job and what was decided about it."""

    job: Demand
    given: Placement
    speedup: float
    """Speed with what it is given relative to before; 1 where nothing changes."""
    left_s: float
    min_devices: int
    """Fewest devices it can run on in this pool; 0 if it cannot run."""
    is_moved: bool
    """As many devices as before, but on other nodes, to make room."""
    has_lost_node: bool
    """A node it ran on is gone."""
    is_unplaced: bool
    misses_deadline: bool
    free: int
    """Devices that no job holds after the decision."""
    capacity: int
    quota: TeamQuota | None
    team_devices: int
    """Devices that all jobs of its team hold after the decision."""
    starts_at: float | None
    """When it will probably start, if it waits."""


class LazyReasons(Mapping[str, Reason]):
    """Reasons that are written when somebody reads them: in most rounds nobody does."""

    def __init__(self, jobs: Sequence[str], explain: Callable[[int], Reason]) -> None:
        """``explain`` takes the index of a job."""
        self._rows = {job: row for row, job in enumerate(jobs)}
        self._explain = explain

    def __getitem__(self, job: str) -> Reason:
        """Why this job gets what it gets."""
        return self._explain(self._rows[job])

    def __iter__(self) -> Iterator[str]:
        """Every job."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self._rows)


def explain_job(case: ExplainedJob) -> Reason:
    """The binding reason; the text of a waiting job says what would unblock it."""
    figures: dict[str, object] = {"devices": case.given.devices, "held": case.job.held.devices}
    if case.given:
        code, text = _explain_running(case)
        figures["left_s"] = case.left_s
        if case.speedup != 1.0:
            figures["speedup"] = case.speedup
    else:
        code, text = _explain_waiting(case)
        figures["needs"] = case.min_devices
        if case.starts_at is not None:
            figures["starts_at"] = case.starts_at
    if case.misses_deadline:
        figures["misses_deadline"] = True
        text += " It will probably miss its deadline."
    return Reason(code=code, text=text, figures=figures)


def _explain_running(case: ExplainedJob) -> tuple[str, str]:
    job, devices = case.job, case.given.devices
    if job.is_pinned:
        return "pinned", f"It keeps its {_count(devices)}: it is being moved, or it is pinned."
    if not job.held:
        return "started", f"It starts on {_count(devices)}: no other job gains more from them."
    return _explain_change(case)


def _explain_change(case: ExplainedJob) -> tuple[str, str]:
    job, devices, held = case.job, case.given.devices, case.job.held.devices
    if case.has_lost_node:
        return "moved", f"It continues on {_count(devices)}: a node it ran on is gone."
    if devices > held:
        return "grown", (
            f"It grows from {held} to {_count(devices)}: {case.speedup:.2f} times as fast, which "
            "outweighs the restart."
        )
    if devices < held:
        return "shrunk", (
            f"It shrinks from {held} to {_count(devices)}: other jobs gain more from the rest."
        )
    if case.is_moved or case.given != job.held:
        return "moved", (
            f"It keeps {_count(devices)} but moves to other nodes, so that free devices are together."
        )
    return "kept", f"It keeps its {_count(devices)}: no change would outweigh a restart."


def _explain_waiting(case: ExplainedJob) -> tuple[str, str]:
    job, needed = case.job, case.min_devices
    if job.budget_dollars is not None and job.budget_dollars <= 0:
        return "over_budget", "Its budget is spent. Raise the budget to continue."
    if needed <= 0 and job.min_devices > case.capacity:
        return "too_large", (
            f"It needs at least {_count(job.min_devices)}; the pool has {case.capacity}. "
            "Lower its minimum or add nodes."
        )
    if needed <= 0:
        return "cannot_run", "No number of devices of this pool fits its limits and its batch size."
    quota = case.quota
    if quota is not None and case.team_devices + needed > quota.limit:
        return "over_quota", (
            f"Its team holds {case.team_devices} of at most {_count(quota.limit)}. "
            "It starts when a job of the team ends, or when the quota is raised."
        )
    if case.is_unplaced or case.free >= needed:
        return "fragmented", (
            f"{_count(case.free)} are free, but not on nodes where {needed} can be used together."
        )
    stopped = "It was stopped and saved: " if job.held else ""
    return ("stopped" if job.held else "waits_for_devices"), (
        f"{stopped or 'It waits: '}jobs with less work left, or with a higher claim, hold "
        f"all {_count(case.capacity)}. It needs {needed}."
    )


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
