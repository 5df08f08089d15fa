"""Communication of a run for the report: method, reason, predicted and measured figures."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_duration
from yunlu.core.value import Value
from yunlu.jobs.run_log import step_s
from yunlu.runs.events import ExchangeSetting, RefusedSetting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.jobs.run_log import Record, RunLog
    from yunlu.runs.events import CommunicationChosen, ExchangePrediction, MeasuredLinks


class Expectation(Value):
    """Measured and predicted value of one quantity of a step."""

    quantity: str
    """``step_s``, ``exchange_s``, ``wait_s`` (of an exchange, what does not hide), ``sent_bytes``."""
    predicted: float | None
    measured: float | None
    """Of a typical step; for methods that exchange every few steps, of so many steps."""
    ratio: float | None
    """Measured over predicted."""


class Candidate(Value):
    """Prediction for another method."""

    name: str
    step_s: float
    cost_s: float
    """With the further steps that it may need: seconds per plain step of progress."""
    is_chosen: bool


class HostLinks(Value):
    """Measured link of one host."""

    host: str
    workers: int
    send_bytes_per_s: float | None
    receive_bytes_per_s: float | None
    bytes_per_s: tuple[float | None, ...]
    """To each host, in order; to itself: between two of its workers."""
    latency_s: tuple[float | None, ...]
    compute_s: float | None = None
    """Step time of its slowest worker, without exchange."""


class ChosenMethod(Value):
    """One communication method, and the steps that were made with it."""

    at: float
    from_step: int
    """Last step before it."""
    steps: int
    """Steps made with it, without those that were undone."""
    name: str
    setting: ExchangeSetting
    guarantee: str
    reason: str
    expectations: tuple[Expectation, ...]
    compression_error: float | None
    """Relative error of the codec in a typical exchange."""
    candidates: tuple[Candidate, ...]
    """The best of each kind, ordered by predicted time to the same loss."""
    refused: tuple[RefusedSetting, ...]
    links: tuple[HostLinks, ...]
    """Empty where nothing was measured."""
    excluded: tuple[str, ...] = ()
    """Hosts excluded as stragglers: the others were predicted to be faster without them."""

    def expectation(self, quantity: str) -> Expectation | None:
        """Predicted beside measured, where at least one of them is known."""
        return next(
            (
                one_expectation
                for one_expectation in self.expectations
                if one_expectation.quantity == quantity
            ),
            None,
        )


class Communication(Value):
    """Communication methods of a run with several workers."""

    choices: tuple[ChosenMethod, ...]
    """In order; links and workers may change."""

    @property
    def newest(self) -> ChosenMethod:
        """The current or last one."""
        return self.choices[-1]


def read_communication(log: RunLog) -> Communication | None:
    """Every choice and its steps; None where nothing was chosen, as for one worker."""
    events = log.view.communications
    if not events:
        return None
    records = [record for record in log.records if "at" in record]
    ends = [event.at for event in events[1:]] + [math.inf]
    choices = [
        _read_choice(
            event, [one_record for one_record in records if event.at <= one_record["at"] < end]
        )
        for event, end in zip(events, ends, strict=True)
    ]
    # A choice that was replaced before its first step, or whose steps were undone, is left out.
    retained = [choice for choice in choices[:-1] if choice.steps or choice.excluded] + choices[-1:]
    return Communication(choices=tuple(retained))


def communication_lines(communication: Communication) -> Iterator[str]:
    """What was chosen, what it did, which hosts were excluded, and what came before: at most a line each."""
    newest = communication.newest
    # Of a long reason the first and last part: the links, and the predicted gain.
    reason = without_name(newest).split("; ")
    yield f"{newest.name} ({newest.guarantee}): {'; '.join(dict.fromkeys((reason[0], reason[-1])))}"
    parts: list[str] = []
    result = newest.expectation("step_s")
    if result is not None and result.measured is not None:
        parts.append(f"{show_duration(result.measured)} a step" + _beside(result, show_duration))
    sent = newest.expectation("sent_bytes")
    if sent is not None and sent.measured is not None:
        parts.append(f"{show_bytes(sent.measured)} sent a step" + _beside(sent, show_bytes))
    if newest.compression_error is not None:
        parts.append(f"packing leaves out {newest.compression_error:.2%}")
    if parts:
        yield "; ".join(parts)
    for choice in communication.choices:
        if choice.excluded:
            yield f"at step {choice.from_step + 1:,} {choice.reason.rpartition('; ')[2]}"
    before = [
        item.name for item, after in pairwise(communication.choices) if item.name != after.name
    ]
    if before:
        yield f"before step {newest.from_step + 1:,}: {', then '.join(before[-3:])}"


def without_name(chosen: ChosenMethod) -> str:
    """The reason without the leading name of the method."""
    return chosen.reason.removeprefix(f"{chosen.name}: ")


def _beside(expectation: Expectation, show: Callable[[float], str]) -> str:
    if expectation.predicted is None:
        return ""
    ratio = "" if expectation.ratio is None else f", × {expectation.ratio:.2f}"
    return f" ({show(expectation.predicted)} predicted{ratio})"


def _read_choice(event: CommunicationChosen, records: Sequence[Record]) -> ChosenMethod:
    return ChosenMethod(
        at=event.at,
        # A resumed worker chooses before it has read the checkpoint.
        from_step=int(records[0]["step"]) - 1 if records else event.step,
        steps=len(records),
        name=event.chosen,
        setting=event.setting,
        guarantee=event.guarantee,
        reason=event.reason,
        expectations=tuple(_expect(event.predicted, records, max(event.setting.every, 1))),
        compression_error=_usual(records, lambda record: record.get("compression_error")),
        candidates=tuple(_candidates(event)),
        refused=event.refused,
        links=tuple(_links(event.links)) if event.links else (),
        excluded=tuple(_excluded_hosts(event)),
    )


def _excluded_hosts(event: CommunicationChosen) -> Iterator[str]:
    hosts = event.links.hosts if event.links else ()
    yield from dict.fromkeys(host for rank, host in enumerate(hosts) if rank in event.excluded)


def _expect(
    predicted: ExchangePrediction | None, records: Sequence[Record], every: int
) -> Iterator[Expectation]:
    wait_s = max(predicted.exchange_s - predicted.hidden_s, 0.0) if predicted else None
    rows: list[tuple[str, float | None, Callable[[Record], float | None]]] = [
        ("step_s", predicted.step_s if predicted else None, step_s),
        (
            "exchange_s",
            predicted.exchange_s if predicted else None,
            lambda record: record.get("exchange_s"),
        ),
        ("wait_s", wait_s, lambda record: record.get("communication_s")),
        (
            "sent_bytes",
            predicted.bytes_per_step if predicted else None,
            lambda record: record.get("sent_bytes"),
        ),
    ]
    for quantity, expected, read in rows:
        measured = _usual(records, read, every=every)
        if expected is None and measured is None:
            continue
        yield Expectation(
            quantity=quantity,
            predicted=expected,
            measured=measured,
            # Fewer steps than between two exchanges say nothing about the exchange time.
            ratio=_ratio(expected, measured) if len(records) >= every else None,
        )


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted if predicted and measured is not None else None


def _usual(
    records: Sequence[Record], read: Callable[[Record], float | None], *, every: int = 1
) -> float | None:
    """Median over spans of the mean step: each span holds as many exchanges as the next."""
    matching_values = [
        value for record in records if (value := read(record)) is not None and math.isfinite(value)
    ]
    whole = len(matching_values) - len(matching_values) % every or len(matching_values)
    stretches = [matching_values[start : start + every] for start in range(0, whole, every)]
    return median(fmean(stretch) for stretch in stretches) if stretches else None


def _candidates(event: CommunicationChosen) -> Iterator[Candidate]:
    for candidate in event.candidates:
        yield Candidate(
            name=candidate.name,
            step_s=candidate.step_s,
            cost_s=candidate.cost_s,
            is_chosen=candidate.name == event.chosen,
        )


def _links(links: MeasuredLinks) -> Iterator[HostLinks]:
    hosts = list(dict.fromkeys(links.hosts))
    spans = links.compute_s or (0.0,) * len(links.hosts)
    for index, host in enumerate(hosts):
        here = [span for at, span in zip(links.hosts, spans, strict=True) if at == host and span]
        yield HostLinks(
            host=host,
            workers=links.hosts.count(host),
            send_bytes_per_s=links.send_bytes_per_s[index],
            receive_bytes_per_s=links.receive_bytes_per_s[index],
            bytes_per_s=links.bytes_per_s[index],
            latency_s=links.latency_s[index],
            compute_s=max(here, default=None),
        )
