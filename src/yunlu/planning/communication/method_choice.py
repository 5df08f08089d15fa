"""Choice of the communication method, and its changes in training: other links, stragglers. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from pydantic import Field

from yunlu.core.errors import YunluError
from yunlu.core.units import show_bytes, show_duration
from yunlu.planning.communication.methods import METHODS, PACKINGS, Guarantee, keeps
from yunlu.planning.communication.step_forecast import (
    ASYNCHRONOUS_S,
    MethodSetting,
    StepForecast,
    forecast,
    split_buckets,
)
from yunlu.planning.communication.timing import (
    Clock,
    SharedWork,
)
from yunlu.planning.machine_profile import FiniteFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from yunlu.planning.communication.step_forecast import StepForecast
    from yunlu.planning.communication.timing import WireFigures

_Any = TypeVar("_Any")

_BUCKET_BYTES = 256 << 10, 1 << 20, 4 << 20, 25 << 20
_EVERY = 2, 4, 8, 16, 32
_DILOCO_EVERY = 20, 50, 100
_DELAYS = 0, 1
_WORTH = 0.9
"""torch's own all-reduce stays unless another method is predicted to take less than this share of its time."""
_SURE = 0.85
"""Asynchronous training, which cannot be undone, needs a lead of this factor over the next best."""
_ALIKE = 1.02
"""A codec that gains less is not used."""
_SHOWN_MBITS = 0.05
_SERVED_CODECS = ("none", "fp16", "bf16", "int8", "int4")
"""Codecs for gradients sent to parameter servers: the effect of the others there is unknown."""


class CommunicationError(YunluError):
    """No communication method satisfies the job."""

    code = "communication"


class Pinned(FiniteFigures):
    """Choices of the user; the rest is chosen."""

    method: str | None = None
    codec: str | None = None
    bucket_bytes: int | None = None
    every: int | None = None
    delay_steps: int | None = None
    rank: int | None = None


class MethodQuery(FiniteFigures):
    """Query of a communication method."""

    work: SharedWork
    guarantee: Guarantee = "exact"
    pinned: Pinned = Pinned()
    available: tuple[str, ...] = tuple(METHODS)
    """Methods that this run can use."""
    hindrances: dict[str, str] = Field(default_factory=dict)
    """Why it cannot use others, by name."""


class Refusal(FiniteFigures):
    """A method that was not considered, and why."""

    name: str
    reason: str


class MethodDecision(FiniteFigures):
    """The chosen method, the candidates, and the reason."""

    question: MethodQuery
    chosen: StepForecast
    plain: StepForecast
    """torch's own all-reduce with its usual buckets."""
    candidates: tuple[StepForecast, ...]
    """The best of each method and codec, including the chosen one, the fastest first."""
    refused: tuple[Refusal, ...]
    reason: str

    @property
    def setting(self) -> MethodSetting:
        """The chosen setting."""
        return self.chosen.setting

    @property
    def gain(self) -> float:
        """Predicted speedup over plain all-reduce."""
        return self.plain.cost_s / self.chosen.cost_s


def choose(figures: WireFigures, question: MethodQuery) -> MethodDecision:
    """Choose by the predicted time to the same loss; never slower than plain all-reduce.

    Raises:
        CommunicationError: What was pinned does not exist, or does not keep the guarantee.
    """
    _check(question)
    clock = Clock(figures)
    plain = forecast(clock, question.work, MethodSetting(method="all-reduce"))
    refused = _refuse(figures, question)
    names = {item.name for item in refused}
    best: dict[str, StepForecast] = {}
    for setting in _settings(question):
        if {setting.method, setting.codec} & names:
            continue
        result = forecast(clock, question.work, setting)
        key = f"{setting.method} {setting.codec}"
        if key not in best or result.cost_s < best[key].cost_s:
            best[key] = result
    candidates = tuple(sorted(best.values(), key=lambda item: item.cost_s))
    if not candidates:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in refused)
        raise CommunicationError(
            f"communication: nothing is left to choose from ({reasons}).",
            hint="Pin less, or allow more with communication.guarantee.",
        )
    chosen = _sure(candidates)
    is_free = question.pinned.method is None and question.pinned.codec is None
    dense = best.get("all-reduce none")
    if is_free and dense is not None and chosen.cost_s > _WORTH * dense.cost_s:
        chosen = dense
    return MethodDecision(
        question=question,
        chosen=chosen,
        plain=plain,
        candidates=candidates,
        refused=refused,
        reason=explain(figures, question.work, chosen, plain),
    )


def _sure(candidates: tuple[StepForecast, ...]) -> StepForecast:
    """The fastest; asynchronous training only with a clear lead."""
    chosen = candidates[0]
    if chosen.setting.method != "asynchronous":
        return chosen
    others = [candidate for candidate in candidates if candidate.setting.method != "asynchronous"]
    if others and chosen.cost_s > _SURE * others[0].cost_s:
        return others[0]
    served = [candidate for candidate in candidates if candidate.setting.method == "asynchronous"]
    plain = next((item for item in served if item.setting.codec == "none"), chosen)
    return plain if plain.cost_s < _ALIKE * chosen.cost_s else chosen


def explain(
    figures: WireFigures, work: SharedWork, chosen: StepForecast, plain: StepForecast
) -> str:
    """As text: what is sent over which links, how long that takes, and how much of it overlaps."""
    result = (
        f"{chosen.setting.name}: {_links(figures)};"
        f" {show_bytes(chosen.bytes_per_step)} a step from each of {figures.size} workers take"
        f" {show_duration(chosen.exchange_s)}"
    )
    if chosen.hidden_s > 0:
        result += f", of which {show_duration(chosen.hidden_s)} hide behind computing"
    parts = [result]
    if chosen.steps_factor > 1:
        parts.append(f"it may need {chosen.steps_factor - 1:.0%} more steps")
    gain = plain.cost_s / chosen.cost_s
    if chosen.setting.method != "all-reduce":
        parts.append(f"{gain:.2f} times as fast as all-reduce to the same loss")
    elif len(split_buckets(work, chosen.setting.bucket_bytes)) > 1 and gain > 1:
        parts.append(f"sent in parts of {show_bytes(chosen.setting.bucket_bytes)}")
    slowest = figures.slowest_compute_s
    if slowest is not None and slowest > 1.3 * sorted(figures.compute_s)[figures.size // 2]:
        late = figures.compute_s.index(slowest)
        is_waited_for = chosen.setting.method != "asynchronous"
        text = "is waited for" if is_waited_for else "takes fewer turns than the others"
        parts.append(f"worker {late} takes {show_duration(slowest)} a step and {text}")
    return "; ".join(parts)


def _links(figures: WireFigures) -> str:
    """Range of the upload and download rates of the hosts."""
    if len(figures.host_names) == 1:
        return f"within one host, {show_bytes(figures.bytes_per_s[0][0])}/s"
    rates = [8e-6 * rate for rate in (*figures.send_bytes_per_s, *figures.receive_bytes_per_s)]
    low, high = min(rates), max(rates)
    if high - low <= (2 * _SHOWN_MBITS + 0.1) * high:
        return f"links of {(low + high) / 2:.3g} Mbit/s"
    return f"links of {low:.3g} to {high:.3g} Mbit/s"


def _check(question: MethodQuery) -> None:
    pinned = question.pinned
    if pinned.method is not None and pinned.method not in METHODS:
        raise CommunicationError(
            f"communication: {pinned.method} is not known.",
            hint=f"There are {', '.join(METHODS)}.",
        )
    method, codec = pinned.method or "all-reduce", pinned.codec or "none"
    if not keeps(question.guarantee, method, codec):
        name = pinned.method if keeps(question.guarantee, "all-reduce", codec) else pinned.codec
        level = max(
            (METHODS[method].guarantee, PACKINGS[codec].guarantee),
            key=("exact", "near", "relaxed").index,
        )
        raise CommunicationError(
            f"communication: {name} does not keep what guarantee '{question.guarantee}' asks for.",
            hint=f"Set communication.guarantee to {level}, or leave out {name}.",
        )


def _refuse(figures: WireFigures, question: MethodQuery) -> tuple[Refusal, ...]:
    refused = [
        Refusal(name=name, reason=reason)
        for name in METHODS
        if (reason := _against_method(figures, question, name)) is not None
    ]
    refused += [
        Refusal(name=name, reason=reason)
        for name in PACKINGS
        if (reason := _against_codec(figures, question, name)) is not None
    ]
    return tuple(refused)


def _against_method(figures: WireFigures, question: MethodQuery, name: str) -> str | None:
    method = METHODS[name]
    hosts = len(figures.host_names)
    if name not in question.available:
        return question.hindrances.get(name, "this run cannot use it")
    if not keeps(question.guarantee, name, "none"):
        return f"it is {method.guarantee}, {question.guarantee} was asked for"
    if method.needs_whole_model and not question.work.is_replicated:
        return "it needs the whole model on each worker"
    if method.needs_shared_hosts and not 1 < hosts < figures.size:
        return "it needs several hosts with several workers each"
    return None


def _against_codec(figures: WireFigures, question: MethodQuery, name: str) -> str | None:
    packing = PACKINGS[name]
    if not keeps(question.guarantee, "all-reduce", name):
        return f"it is {packing.guarantee}, {question.guarantee} was asked for"
    if packing.needs_freezing and not question.work.can_freeze:
        return "it needs an optimiser that can freeze its second moment, such as adamw"
    if name == "powersgd" and not question.work.matrices:
        return "the model has no matrices"
    if name not in ("none", "powersgd") and figures.codec(name) is None:
        return "what it costs here was not measured"
    return None


def _settings(question: MethodQuery) -> Iterator[MethodSetting]:
    pinned = question.pinned
    for method in _only(METHODS, pinned.method):
        kind = METHODS[method].kind
        buckets = (
            _only(_BUCKET_BYTES, pinned.bucket_bytes) if kind == "synchronous" else (25 << 20,)
        )
        usual = _DILOCO_EVERY if method == "diloco" else _EVERY
        every = _only(usual, pinned.every) if kind == "local" else (1,)
        delays = _only(_DELAYS, pinned.delay_steps) if kind == "local" else (0,)
        codecs = [name for name in _only(PACKINGS, pinned.codec) if _fits(method, name)]
        for codec, bucket, steps, delay in product(codecs, buckets, every, delays):
            yield MethodSetting(
                method=method,
                codec=codec,
                bucket_bytes=bucket,
                every=steps,
                delay_steps=delay,
                rank=pinned.rank or 4,
            )


def _fits(method: str, codec: str) -> bool:
    """Encoded parts are reduced by their owners; PowerSGD's factors are dense, and work with any algorithm."""
    if codec == "none":
        return True
    if codec == "powersgd":
        return METHODS[method].kind == "synchronous"
    if method == "asynchronous":
        return codec in _SERVED_CODECS
    return method == "direct" or METHODS[method].kind != "synchronous"


def _only(usual: Iterable[_Any], pinned: _Any | None) -> tuple[_Any, ...]:
    return tuple(usual) if pinned is None else (pinned,)


_GAIN_PER_HOST = 0.25
"""Least gain of the time to the same loss per excluded host; less does not justify an idle device."""
_LAGGING = 1.5
"""A straggler is this many times slower than most others: where all links are slow, there is none."""
_LEAVE_S = 5.0
"""Cost of an exclusion: the others rendezvous again, and measure their links."""
_REPAID = 2.0
"""Factor by which the gain must exceed the cost of the change."""


class StragglerExclusion(FiniteFigures):
    """Hosts to exclude, and why."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    step_s: float
    """Predicted step time without them."""
    reason: str


def find_stragglers_to_exclude(
    decision: MethodDecision, figures: WireFigures, *, steps_left: int | None = None
) -> StragglerExclusion | None:
    """The hosts without which the same loss is reached at least a quarter sooner; none where all are of use.

    The first worker's host always stays: it speaks for all.
    """
    best, retained = decision, figures
    for fewer, rest in _leave_one_by_one(decision, figures):
        # Of two equally slow hosts, only excluding both gains anything.
        if fewer.chosen.cost_s <= (1 - _GAIN_PER_HOST) * best.chosen.cost_s:
            best, retained = fewer, rest
    if retained is figures:
        return None
    gained_s = decision.chosen.cost_s - best.chosen.cost_s
    if steps_left is not None and gained_s * steps_left < _REPAID * _LEAVE_S:
        return None
    gone = tuple(host for host in figures.host_names if host not in retained.host_names)
    ranks = tuple(rank for rank, host in enumerate(figures.hosts) if host in gone)
    text = (
        f"{', '.join(gone)} {'steps' if len(gone) == 1 else 'step'} aside: a step without is"
        f" predicted to take {show_duration(best.chosen.step_s)}, not"
        f" {show_duration(decision.chosen.step_s)}"
    )
    return StragglerExclusion(hosts=gone, ranks=ranks, step_s=best.chosen.step_s, reason=text)


def _leave_one_by_one(
    decision: MethodDecision, figures: WireFigures
) -> Iterator[tuple[MethodDecision, WireFigures]]:
    """The choice without one, two, ... hosts that the others wait for most."""
    retained = figures
    while result := [
        (choose(rest, _with_more(decision, size=figures.size, of=rest.size)), rest)
        for rest in _without_each(retained)
    ]:
        fewer, retained = min(result, key=lambda item: item[0].chosen.cost_s)
        yield fewer, retained


def _with_more(decision: MethodDecision, *, size: int, of: int) -> MethodQuery:
    """The same query for fewer workers, each with more samples."""
    question, more = decision.question, size / of
    work = question.work.model_copy(update={"compute_s": question.work.compute_s * more})
    return question.model_copy(update={"work": work})


def _without_each(figures: WireFigures) -> Iterator[WireFigures]:
    """Without the host of the slowest compute, and without that of the slowest link, if they lag."""
    names = figures.host_names
    if len(names) == 1:
        return
    rates = np.array(figures.bytes_per_s)
    np.fill_diagonal(rates, 0.0)
    # Its best links in both directions: a slow host makes one link of every other host slow too.
    links = 1 / np.minimum(rates.max(axis=0), rates.max(axis=1))
    if len(names) == 2:
        links[0] = 0.0  # a single host would wait for no link
    paces = np.zeros(len(names))
    if figures.compute_s:
        np.maximum.at(paces, figures.host_numbers, np.array(figures.compute_s))
    for slowest in sorted({_find_lagging(links), _find_lagging(paces)}):
        if slowest > 0:
            yield figures.without(names[slowest])


def _find_lagging(spans: NDArray[np.float64]) -> int:
    """The host that lags behind the rest; the first, which always stays, where none does."""
    slowest = 1 + int(spans[1:].argmax())
    is_lagging = spans[slowest] > _LAGGING * np.median(np.delete(spans, slowest))
    return slowest if is_lagging else 0


GAIN = 0.15
"""Least gain of the time to the same loss for a change: about the error of predictions."""
SWITCH_S = 2.0
"""Cost of a switch: new connections and buffers, lost residuals."""
_DOUBT = 1.25
"""Predictions that differ by less may be in the wrong order."""
_LEAST_STEPS = 100
"""With fewer steps left a timed comparison does not pay off."""
_WINDOW = 9
_CHANGED = 1.3
"""Ratio of exchange times, in either direction, that counts as a change."""


def should_switch(
    decision: MethodDecision,
    figures: WireFigures,
    *,
    steps_left: int | None = None,
    switch_s: float | None = None,
) -> MethodDecision | None:
    """A new decision where it gains at least 15 % and pays for the switch in the remaining steps."""
    fresh = choose(figures, decision.question)
    if fresh.setting == decision.setting:
        return None
    now = forecast(Clock(figures), decision.question.work, decision.setting)
    gained_s = now.cost_s - fresh.chosen.cost_s
    if gained_s < GAIN * now.cost_s:
        return None
    if switch_s is None:
        is_served = METHODS[fresh.setting.method].kind == "asynchronous"
        switch_s = ASYNCHRONOUS_S if is_served else SWITCH_S
    left = decision.question.work.steps if steps_left is None else steps_left
    if left is not None and gained_s * left < _REPAID * switch_s:
        return None
    return fresh


def renew(decision: MethodDecision, figures: WireFigures) -> MethodDecision:
    """The same setting, predicted for other links."""
    work = decision.question.work
    chosen = forecast(Clock(figures), work, decision.setting)
    reason = explain(figures, work, chosen, decision.plain)
    return decision.model_copy(update={"chosen": chosen, "reason": reason})


def find_faster_method(decision: MethodDecision, *, steps_left: int | None) -> StepForecast | None:
    """The runner-up that might be faster than the choice: torch's all-reduce, or the fastest of ours.

    None where the prediction leaves no doubt, where the user decides, and where it could matter for
    the loss which of the two is taken.
    """
    chosen, pinned = decision.chosen, decision.question.pinned
    is_short = steps_left is not None and steps_left < _LEAST_STEPS
    if is_short or pinned.method is not None or not _is_plain(chosen):
        return None
    is_torch = chosen.setting.method == "all-reduce"
    others = [
        candidate
        for candidate in decision.candidates
        if _is_plain(candidate) and (candidate.setting.method == "all-reduce") != is_torch
    ]
    if not others or not 1 / _DOUBT < others[0].cost_s / chosen.cost_s < _DOUBT:
        return None
    return others[0]


def _is_plain(forecast: StepForecast) -> bool:
    setting = forecast.setting
    return setting.codec == "none" and METHODS[setting.method].kind == "synchronous"


@dataclass(frozen=True, slots=True)
class LinkMonitor:
    """Ratio of recent exchange times to the predicted ones.

    Predictions may be off by a constant share, so the first exchanges say what is usual. The median of a
    few is compared: single ones are late for many reasons.
    """

    predicted_s: float
    ratios: tuple[float, ...] = ()
    usual: float | None = None

    def note(self, seconds: float) -> LinkMonitor:
        """With one more exchange; zero times are ignored."""
        if not (math.isfinite(seconds) and seconds > 0 and self.predicted_s > 0):
            return self
        ratios = (*self.ratios, seconds / self.predicted_s)[-_WINDOW:]
        usual = self.usual
        if usual is None and len(ratios) == _WINDOW:
            return replace(self, ratios=(), usual=statistics.median(ratios))
        return replace(self, ratios=ratios)

    @property
    def ratio(self) -> float | None:
        """Current ratio of exchange time to prediction; None until enough were seen."""
        return statistics.median(self.ratios) if len(self.ratios) == _WINDOW else self.usual

    @property
    def has_changed(self) -> bool:
        """Whether the links should be measured again."""
        if self.usual is None or len(self.ratios) < _WINDOW:
            return False
        change = statistics.median(self.ratios) / self.usual
        return change > _CHANGED or change < 1 / _CHANGED
