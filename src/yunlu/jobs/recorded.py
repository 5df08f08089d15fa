"""What a run's two logs say, once its later lives have overwritten the steps they did again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from yunlu.runs.run_dir import Event, EventKind
from yunlu.runs.run_store import Log
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.jobs.curves import Point
    from yunlu.runs.run_store import RunStore

Record = dict[str, float]
"""The numbers of one step, by the names of ``METRIC_KEYS``."""

PARTS = ("data", "compute", "communication", "checkpoint", "evaluation", "other")
"""Where time goes; ``other`` is start-up, the final scoring and whatever no part claims."""
_IN_STEP = ("data_s", "compute_s", "communication_s")
_AFTER_STEP = ("checkpoint_s", "evaluate_s")
_CLAIMED = (*_IN_STEP, *_AFTER_STEP)
_STRETCHES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One worker, from its start to its last sign."""

    number: int
    """1 for the first."""
    started_at: float
    """When it began; for a worker of its own, when its process started."""
    began_at: float
    """When it could first write."""
    ended_at: float
    resumed_from: int | None
    """The step it went on from; None for the first life, or where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A way back to an earlier step: a life, a rollback or a crew that went on from there."""

    place: int
    """Its event's place in the log; all that stands before it may be undone by it."""
    to_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The logs of a run. Steps that a crash undid and no life has reached again are left out."""

    events: Sequence[Event]
    records: Sequence[Record]
    """One per step, in order."""
    lives: Sequence[Life]
    returns: Sequence[Return]

    def all(self, kind: EventKind) -> list[dict[str, Any]]:
        """The data of each event of a kind."""
        return [event.data for event in self.events if event.kind == kind]

    def last(self, kind: EventKind) -> dict[str, Any] | None:
        """The data of the newest event of a kind."""
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def wall_s(self) -> float:
        """Seconds that workers were alive: the time between two lives costs nothing."""
        return sum(life.ended_at - life.started_at for life in self.lives)

    def by_step(self, kind: EventKind) -> list[dict[str, Any]]:
        """Data of the events that belong to a step, without the steps that were undone."""
        return [
            event.data
            for place, event in enumerate(self.events)
            if event.kind == kind and not self._is_undone(event.data.get("step"), place)
        ]

    def _is_undone(self, step: object, place: int) -> bool:
        """Whether a later event went back to before this step."""
        at_step = number(step)
        return at_step is not None and any(
            back.place > place and back.to_step < at_step for back in self.returns
        )


def read_recorded(run: RunStore) -> Recorded:
    """Read both logs. Lines that this version does not know are passed over."""
    events = list(_known(record for record, _ in run.read_log(Log.EVENTS)))
    read = (numbers(record) for record, _ in run.read_log(Log.METRICS))
    records = [record for record in read if "step" in record]
    lives = _lives(events, records)
    kept = _latest(records, lives)
    undone_after = _undone_after(events)
    return Recorded(
        events=events,
        records=[record for record in kept if not _is_left_behind(record, undone_after)],
        lives=lives,
        returns=_returns(events),
    )


def number(value: object) -> float | None:
    """A number, finite or not, also from its name in JSON (``"NaN"``); else None."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def numbers(data: Any) -> dict[str, float]:
    """The named numbers of a mapping; what is not a number is left out."""
    named = data.items() if isinstance(data, dict) else ()
    return {str(name): value for name, each in named if (value := number(each)) is not None}


def points(records: Iterable[Record], key: str) -> list[Point]:
    """One key of the records over the step."""
    return [(int(record["step"]), record[key]) for record in records if key in record]


def step_s(record: Record) -> float:
    """The seconds of a step itself."""
    return sum(record.get(key, 0.0) for key in _IN_STEP)


def held_up_s(record: Record) -> float:
    """The seconds that a step held up the next one: its evaluation, its checkpoint."""
    return sum(record.get(key, 0.0) for key in _AFTER_STEP)


def samples_of_steps(records: Sequence[Record]) -> dict[int, float]:
    """Samples that each step consumed, from the running count."""
    counts: dict[int, float] = {}
    before_step, before = 0, 0.0
    for step, count in points(records, "samples"):
        counts[step] = (count - before) / (step - before_step)
        before_step, before = step, count
    return counts


def rates(records: Sequence[Record], counts: dict[int, float]) -> list[Point]:
    """A count of each step over the seconds of that step."""
    seconds = {int(record["step"]): step_s(record) for record in records}
    return [(step, count / seconds[step]) for step, count in counts.items() if seconds[step] > 0]


def parts_over_time(recorded: Recorded) -> tuple[list[int], dict[str, list[float]]]:
    """Shares of the parts in up to 60 stretches of steps, with the last step of each."""
    seconds = [
        [*(record.get(key, 0.0) for key in _CLAIMED), other]
        for record, other in zip(recorded.records, _unclaimed(recorded), strict=True)
    ]
    stretches = min(_STRETCHES, len(seconds))
    edges = [round(i * len(seconds) / stretches) for i in range(stretches + 1)]
    steps: list[int] = []
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for start, end in pairwise(edges):
        sums = [sum(column) for column in zip(*seconds[start:end], strict=True)]
        if (whole := sum(sums)) > 0:
            steps.append(int(recorded.records[end - 1]["step"]))
            for part, spent in zip(PARTS, sums, strict=True):
                shares[part].append(spent / whole)
    return steps, shares


def part_totals(recorded: Recorded) -> dict[str, float]:
    """Seconds by part; with ``other`` they add up to the time that workers were alive."""
    totals = {
        part: sum(record.get(key, 0.0) for record in recorded.records)
        for part, key in zip(PARTS, _CLAIMED, strict=False)
    }
    rest = recorded.wall_s - sum(totals.values()) if recorded.lives else 0.0
    return totals | {"other": max(rest, 0.0)}


def _known(lines: Iterable[object]) -> Iterable[Event]:
    for line in lines:
        try:
            yield Event.model_validate(line)
        except ValidationError:
            continue


def _latest(records: Iterable[Record], lives: Sequence[Life]) -> list[Record]:
    """One record per step. The log's order decides, not its clock, which may have been set back."""
    latest: dict[int, Record] = {}
    for record in records:
        step = int(record["step"])
        if latest and step <= next(reversed(latest)):
            # Back at an earlier step: what had been done from there on no longer counts.
            latest = {before: each for before, each in latest.items() if before < step}
        latest[step] = record
    return [record for record in latest.values() if not _is_undone(record, lives)]


def _is_undone(record: Record, lives: Sequence[Life]) -> bool:
    """Whether a later life, which may not have done a step yet, went back to before this one."""
    return any(
        life.resumed_from is not None
        and record["step"] > life.resumed_from
        and _is_before(record, life)
        for life in lives
    )


def _undone_after(events: Sequence[Event]) -> list[tuple[tuple[float, float], float]]:
    """Life and generation of each crew, with the step it went on from."""
    found: list[tuple[tuple[float, float], float]] = []
    life = 0
    for event in events:
        life += event.kind == EventKind.LIFE
        if event.kind == EventKind.CREW:
            generation = number(event.data.get("generation"))
            from_step = number(event.data.get("from_step"))
            if generation is not None and from_step is not None:
                found.append(((max(life, 1), generation), from_step))
    return found


def _is_left_behind(
    record: Record, undone_after: Sequence[tuple[tuple[float, float], float]]
) -> bool:
    """Whether a later crew, which may not have done a step yet, went back to before this one."""
    if "generation" not in record:
        return False
    own = (record.get("life", 1.0), record["generation"])
    return any(own < crew and record["step"] > from_step for crew, from_step in undone_after)


def _is_before(record: Record, life: Life) -> bool:
    if "life" in record:
        return record["life"] < life.number
    return record.get("at", math.inf) < life.began_at  # logs of older versions


def _lives(events: Sequence[Event], records: Sequence[Record]) -> list[Life]:
    starts = [i for i, event in enumerate(events) if event.kind == EventKind.LIFE]
    lives: list[Life] = []
    for start, end in pairwise([*starts, len(events)]):
        own = [event for event in events[start:end] if not _from_outside(event)]
        began_at = own[0].at
        until = events[end].at if end < len(events) else math.inf
        this = len(lives) + 1
        signs = [event.at for event in own]
        signs += [
            at
            for record in records
            if (at := record.get("at")) is not None
            and (record["life"] == this if "life" in record else began_at <= at < until)
        ]
        process_at = number(own[0].data.get("began_at"))
        lives.append(
            Life(
                number=this,
                started_at=began_at if process_at is None else min(process_at, began_at),
                began_at=began_at,
                ended_at=max(signs),
                resumed_from=_resumed_from(own) if lives else None,
            )
        )
    return lives


def _returns(events: Sequence[Event]) -> list[Return]:
    returns: list[Return] = []
    lives, broke_at = 0, None
    for place, event in enumerate(events):
        lives += event.kind == EventKind.LIFE
        if event.kind == EventKind.FAULT and broke_at is None:
            broke_at = place
        if event.kind == EventKind.CREW:
            # Told once it works: what its first step did may stand before it, but after the fault.
            if number(event.data.get("redone_steps")):
                since = place if broke_at is None else broke_at
                to_step = int(number(event.data.get("from_step")) or 0)
                returns.append(Return(place=since, to_step=to_step))
            broke_at = None
            continue
        key = "to_step" if event.kind == EventKind.ROLLBACK else "resumed_from_step"
        if key not in event.data or (key == "resumed_from_step" and lives < 2):
            continue
        returns.append(Return(place=place, to_step=int(number(event.data[key]) or 0)))
    return returns


def _resumed_from(events: Iterable[Event]) -> int | None:
    """The step a later life went on from: 0 if it said that there was none to go on from."""
    for event in events:
        if "resumed_from_step" in event.data:
            return int(event.data["resumed_from_step"] or 0)
    return None


def _from_outside(event: Event) -> bool:
    """Others write "pending" and "lost", perhaps hours after the worker's last sign."""
    return event.kind == EventKind.STATE and event.data.get("state") in {
        RunState.PENDING,
        RunState.LOST,
    }


def _unclaimed(recorded: Recorded) -> list[float]:
    """Seconds since the step before that no part claims; a step that began a life has none."""
    unclaimed = [0.0] * min(len(recorded.records), 1)
    for before, after in pairwise(recorded.records):
        since, until = number(before.get("at")), number(after.get("at"))
        if since is None or until is None or _begins_life(before, after, recorded.lives):
            unclaimed.append(0.0)
        else:
            # A record is stamped when its step ends; what came after that step lies before this one.
            unclaimed.append(max(until - since - held_up_s(before) - step_s(after), 0.0))
    return unclaimed


def _begins_life(before: Record, after: Record, lives: Sequence[Life]) -> bool:
    if "life" in before and "life" in after:
        return before["life"] != after["life"]
    return any(before["at"] < life.began_at <= after["at"] for life in lives)
