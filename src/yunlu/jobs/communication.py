"""How the workers of a run communicated: what was chosen, why, and whether it did what was predicted."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from yunlu.core.units import show_bytes, show_duration
from yunlu.core.value import Value
from yunlu.jobs.run_log import number, step_s
from yunlu.runs.run_dir import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from yunlu.jobs.run_log import Record, RunLog
    from yunlu.runs.run_dir import Event


class Expectation(Value):
    """One quantity of a step beside what was predicted of it."""

    quantity: str
    """``step_s``, ``exchange_s``, ``wait_s`` (of an exchange, what does not hide), ``sent_bytes``."""
    predicted: float | None
    measured: float | None
    """Of a usual step; of a method that exchanges every few steps, of as many of them."""
    ratio: float | None
    """Measured over predicted."""


class Candidate(Value):
    """What another way was predicted to take."""

    name: str
    step_s: float
    cost_s: float
    """With the further steps that it may need: what the progress of a plain step takes."""
    is_chosen: bool


class Refused(Value):
    """What was not considered, and why."""

    name: str
    reason: str


class HostLinks(Value):
    """What one host can send and receive, as it was measured."""

    host: str
    workers: int
    send_bytes_per_s: float | None
    receive_bytes_per_s: float | None
    bytes_per_s: tuple[float | None, ...]
    """To each host, in the order of the hosts; to itself, between two of its workers."""
    latency_s: tuple[float | None, ...]
    compute_s: float | None = None
    """A step of its slowest worker, without any exchange."""


class Chosen(Value):
    """One way to communicate, and the steps that were made with it."""

    at: float
    from_step: int
    """The next one is its first."""
    steps: int
    """Made with it, without those that were undone."""
    name: str
    setting: dict[str, Any]
    guarantee: str
    reason: str
    expectations: tuple[Expectation, ...]
    compression_error: float | None
    """What packing left out of a usual exchange, relative to what it was given."""
    candidates: tuple[Candidate, ...]
    """The best of each kind, the one to reach the same loss first before the others."""
    refused: tuple[Refused, ...]
    links: tuple[HostLinks, ...]
    """Empty where nothing was measured."""
    aside: tuple[str, ...] = ()
    """Hosts that stepped aside then: the others were to be faster without them."""

    def expectation(self, quantity: str) -> Expectation | None:
        """Predicted beside measured, where at least one of them is known."""
        return next((each for each in self.expectations if each.quantity == quantity), None)


class Communication(Value):
    """How several workers exchanged what they learnt."""

    choices: tuple[Chosen, ...]
    """In the order they were made; links may change, and workers."""

    @property
    def newest(self) -> Chosen:
        """How they communicate, or did at the end."""
        return self.choices[-1]


def read_communication(recorded: RunLog) -> Communication | None:
    """Every choice with what followed; None where nothing was ever chosen, as for one worker."""
    events = [event for event in recorded.events if _is_choice(event)]
    if not events:
        return None
    records = [record for record in recorded.records if "at" in record]
    ends = [event.at for event in events[1:]] + [math.inf]
    choices = [
        _read_choice(event, [each for each in records if event.at <= each["at"] < end])
        for event, end in zip(events, ends, strict=True)
    ]
    # What was replaced before a step was made with it, or whose steps were undone, tells nothing.
    kept = [each for each in choices[:-1] if each.steps or each.aside] + choices[-1:]
    return Communication(choices=tuple(kept))


def communication_lines(communication: Communication) -> Iterator[str]:
    """What was chosen, what it did, who stepped aside, and what came before: at most a line each."""
    newest = communication.newest
    # Of a long reason the ends: the links, and how much faster it should be.
    reason = without_name(newest).split("; ")
    yield f"{newest.name} ({newest.guarantee}): {'; '.join(dict.fromkeys((reason[0], reason[-1])))}"
    parts: list[str] = []
    told = newest.expectation("step_s")
    if told is not None and told.measured is not None:
        parts.append(f"{show_duration(told.measured)} a step" + _beside(told, show_duration))
    sent = newest.expectation("sent_bytes")
    if sent is not None and sent.measured is not None:
        parts.append(f"{show_bytes(sent.measured)} sent a step" + _beside(sent, show_bytes))
    if newest.compression_error is not None:
        parts.append(f"packing leaves out {newest.compression_error:.2%}")
    if parts:
        yield "; ".join(parts)
    for each in communication.choices:
        if each.aside:
            yield f"at step {each.from_step + 1:,} {each.reason.rpartition('; ')[2]}"
    before = [
        each.name for each, after in pairwise(communication.choices) if each.name != after.name
    ]
    if before:
        yield f"before step {newest.from_step + 1:,}: {', then '.join(before[-3:])}"


def without_name(chosen: Chosen) -> str:
    """The reason alone, which begins with the name of what was chosen."""
    return chosen.reason.removeprefix(f"{chosen.name}: ")


def _beside(told: Expectation, show: Callable[[float], str]) -> str:
    if told.predicted is None:
        return ""
    ratio = "" if told.ratio is None else f", × {told.ratio:.2f}"
    return f" ({show(told.predicted)} predicted{ratio})"


def _is_choice(event: Event) -> bool:
    return event.kind == EventKind.COMMUNICATION and bool(event.data.get("chosen"))


def _read_choice(event: Event, records: Sequence[Record]) -> Chosen:
    data = event.data
    name, setting = str(data["chosen"]), _mapping(data.get("setting"))
    every = max(int(_finite(setting.get("every")) or 1), 1)
    told_step = int(_finite(data.get("step")) or 0)
    return Chosen(
        at=event.at,
        # A worker that goes on from a checkpoint chooses before it has read it.
        from_step=int(records[0]["step"]) - 1 if records else told_step,
        steps=len(records),
        name=name,
        setting=setting,
        guarantee=str(data.get("guarantee") or ""),
        reason=str(data.get("reason") or ""),
        expectations=tuple(_expect(_mapping(data.get("predicted")), records, every)),
        compression_error=_usual(records, lambda each: each.get("compression_error")),
        candidates=tuple(_candidates(data.get("candidates"), name)),
        refused=tuple(
            Refused(name=str(each.get("name") or ""), reason=str(each.get("reason") or ""))
            for each in _mappings(data.get("refused"))
        ),
        links=tuple(_links(_mapping(data.get("links")))),
        aside=tuple(_aside(data)),
    )


def _aside(data: dict[str, Any]) -> Iterator[str]:
    hosts = [str(host) for host in _list(_mapping(data.get("links")).get("hosts"))]
    ranks = {int(rank) for each in _list(data.get("aside")) if (rank := _finite(each)) is not None}
    yield from dict.fromkeys(host for rank, host in enumerate(hosts) if rank in ranks)


def _expect(
    predicted: dict[str, Any], records: Sequence[Record], every: int
) -> Iterator[Expectation]:
    exchange_s, hidden_s = (_finite(predicted.get(key)) for key in ("exchange_s", "hidden_s"))
    wait_s = None if exchange_s is None else max(exchange_s - (hidden_s or 0.0), 0.0)
    rows: list[tuple[str, float | None, Callable[[Record], float | None]]] = [
        ("step_s", _finite(predicted.get("step_s")), step_s),
        ("exchange_s", exchange_s, lambda each: each.get("exchange_s")),
        ("wait_s", wait_s, lambda each: each.get("communication_s")),
        (
            "sent_bytes",
            _finite(predicted.get("bytes_per_step")),
            lambda each: each.get("sent_bytes"),
        ),
    ]
    for quantity, foretold, read in rows:
        measured = _usual(records, read, every=every)
        if foretold is None and measured is None:
            continue
        yield Expectation(
            quantity=quantity,
            predicted=foretold,
            measured=measured,
            # Fewer steps than there are between two exchanges say nothing of what these take.
            ratio=_ratio(foretold, measured) if len(records) >= every else None,
        )


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted if predicted and measured is not None else None


def _usual(
    records: Sequence[Record], read: Callable[[Record], float | None], *, every: int = 1
) -> float | None:
    """The median over stretches of the mean step: each stretch holds as many exchanges as the next."""
    found = [
        value for record in records if (value := read(record)) is not None and math.isfinite(value)
    ]
    whole = len(found) - len(found) % every or len(found)
    stretches = [found[start : start + every] for start in range(0, whole, every)]
    return median(fmean(stretch) for stretch in stretches) if stretches else None


def _candidates(said: object, chosen: str) -> Iterator[Candidate]:
    for each in _mappings(said):
        step, cost = (_finite(each.get(key)) for key in ("step_s", "cost_s"))
        if step is not None:
            name = str(each.get("name") or "")
            yield Candidate(
                name=name,
                step_s=step,
                cost_s=step if cost is None else cost,
                is_chosen=name == chosen,
            )


def _links(said: dict[str, Any]) -> Iterator[HostLinks]:
    hosts = [str(host) for host in _list(said.get("hosts"))]
    names = list(dict.fromkeys(hosts))
    spans = _row(_list(said.get("compute_s")), len(hosts))
    for place, host in enumerate(names):
        here = [span for at, span in zip(hosts, spans, strict=True) if at == host and span]
        rates, latencies = (
            _row(_list(_at(said.get(key), place)), len(names))
            for key in ("bytes_per_s", "latency_s")
        )
        yield HostLinks(
            host=host,
            workers=hosts.count(host),
            send_bytes_per_s=_finite(_at(said.get("send_bytes_per_s"), place)),
            receive_bytes_per_s=_finite(_at(said.get("receive_bytes_per_s"), place)),
            bytes_per_s=rates,
            latency_s=latencies,
            compute_s=max(here, default=None),
        )


def _row(said: Sequence[object], length: int) -> tuple[float | None, ...]:
    return tuple(_finite(_at(said, place)) for place in range(length))


def _at(said: object, place: int) -> object:
    found = _list(said)
    return found[place] if place < len(found) else None


def _list(said: object) -> Sequence[Any]:
    return said if isinstance(said, list) else ()


def _mapping(said: object) -> dict[str, Any]:
    return {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}


def _mappings(said: object) -> Iterable[dict[str, Any]]:
    return (_mapping(each) for each in _list(said))


def _finite(value: object) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None
