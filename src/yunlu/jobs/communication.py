"""Communication of a run for the report: method, reason, predicted and measured figures."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from yunlu.core.units import show_bytes, show_duration
from yunlu.core.value import Value
from yunlu.jobs.step_summary import step_seconds
from yunlu.runs.events import ExchangeSetting, RefusedSetting
from yunlu.runs.value_sample import ValueSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from yunlu.jobs.logged_steps import RunLog
    from yunlu.runs.events import CommunicationChosen, ExchangePrediction, MeasuredLinks
    from yunlu.runs.step_batches import StepBatch

FloatArray = NDArray[np.float64]


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
    ends = [event.at for event in events[1:]] + [math.inf]
    spans = [_Span(event, end) for event, end in zip(events, ends, strict=True)]
    for batch in log.batches():
        for span in spans:
            span.add(batch)
    choices = [_read_choice(span.event, span) for span in spans]
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


class _Span:
    """The steps that were made with one choice."""

    def __init__(self, event: CommunicationChosen, end: float) -> None:
        self.event = event
        self._end = end
        self.steps = 0
        self.first_step: int | None = None
        self.every = max(event.setting.every, 1)
        self.usual = {name: _UsualStep(self.every) for name in _QUANTITIES}
        self.usual["compression_error"] = _UsualStep(1)

    def add(self, batch: StepBatch) -> None:
        at = batch.get("at", math.nan)
        own = batch.take((at >= self.event.at) & (at < self._end))
        if not own.size:
            return
        if self.first_step is None:
            self.first_step = int(own.step[0])
        self.steps += own.size
        self.usual["step_s"].add(step_seconds(own))
        for quantity, name in _COLUMNS.items():
            self.usual[quantity].add(own.get(name)[own.has(name)])


class _UsualStep:
    """Median over spans of the mean step: each span holds as many exchanges as the next."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._means = ValueSample()
        self._rest: FloatArray = np.empty(0)

    def add(self, values: FloatArray) -> None:
        rest = np.concatenate((self._rest, values[np.isfinite(values)]))
        whole = len(rest) - len(rest) % self._every
        self._means.add(rest[:whole].reshape(-1, self._every).mean(axis=1))
        self._rest = rest[whole:]

    @property
    def value(self) -> float | None:
        means = self._means.values
        if len(means):
            return float(np.median(means))
        return float(self._rest.mean()) if len(self._rest) else None


_QUANTITIES = ("step_s", "exchange_s", "wait_s", "sent_bytes")
_COLUMNS = {
    "exchange_s": "exchange_s",
    "wait_s": "communication_s",
    "sent_bytes": "sent_bytes",
    "compression_error": "compression_error",
}


def _read_choice(event: CommunicationChosen, span: _Span) -> ChosenMethod:
    return ChosenMethod(
        at=event.at,
        # A resumed worker chooses before it has read the checkpoint.
        from_step=event.step if span.first_step is None else span.first_step - 1,
        steps=span.steps,
        name=event.chosen,
        setting=event.setting,
        guarantee=event.guarantee,
        reason=event.reason,
        expectations=tuple(_expect(event.predicted, span)),
        compression_error=span.usual["compression_error"].value,
        candidates=tuple(_candidates(event)),
        refused=event.refused,
        links=tuple(_links(event.links)) if event.links else (),
        excluded=tuple(_excluded_hosts(event)),
    )


def _excluded_hosts(event: CommunicationChosen) -> Iterator[str]:
    hosts = event.links.hosts if event.links else ()
    yield from dict.fromkeys(host for rank, host in enumerate(hosts) if rank in event.excluded)


def _expect(predicted: ExchangePrediction | None, span: _Span) -> Iterator[Expectation]:
    expected = (
        {
            "step_s": predicted.step_s,
            "exchange_s": predicted.exchange_s,
            "wait_s": max(predicted.exchange_s - predicted.hidden_s, 0.0),
            "sent_bytes": predicted.bytes_per_step,
        }
        if predicted
        else {}
    )
    for quantity in _QUANTITIES:
        measured = span.usual[quantity].value
        if expected.get(quantity) is None and measured is None:
            continue
        yield Expectation(
            quantity=quantity,
            predicted=expected.get(quantity),
            measured=measured,
            # Fewer steps than between two exchanges say nothing about the exchange time.
            ratio=_ratio(expected.get(quantity), measured) if span.steps >= span.every else None,
        )


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return measured / predicted if predicted and measured is not None else None


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
