"""Forecast of a step under one communication method, synchronous or asynchronous. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from yunlu.planning.communication.methods import BEFORE_ONE_BIT, METHODS, one_bit_from, steps_factor
from yunlu.planning.communication.timing import Clock, Span
from yunlu.planning.machine_profile import FiniteFigures
from yunlu.planning.predict.local import compose_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.planning.communication.timing import SharedWork, WireFigures


_VALUE_BYTES = 4
_WORDS = 4
"""Short messages of a ticket, there and back: assignment and completion."""
_UPDATE_PASSES = 5.0
"""Passes over memory, each as long as an addition: optimiser, log, and the copy that is sent."""
_MEMORY_BYTES_PER_S = 4e9
"""Memory bandwidth for weights and moments, which do not fit into the cache."""
_PULLED = {"none": 1.0, "bf16": 0.5}
"""Weights are not compressed below half."""


@dataclass(frozen=True, slots=True)
class AsyncForecast:
    """Predicted step of asynchronous workers."""

    step_s: float
    exchange_s: float
    """Of a typical ticket: pull, encode and push."""
    sent_bytes: float
    """Bytes that one worker sends for a ticket."""


def forecast_async(
    figures: WireFigures, work: SharedWork, setting: MethodSetting, *, staleness: int
) -> AsyncForecast:
    """Predict a step, which is as many tickets as there are workers.

    Args:
        figures: Links, and what a ticket takes each worker to compute.
        work: What travels.
        setting: How it is packed.
        staleness: How many steps after the oldest that is not over one may begin.
    """
    spans = figures.compute_s or (work.compute_s,) * figures.size
    values = work.bytes / _VALUE_BYTES
    cost = figures.codec(setting.codec)
    pushed = work.bytes if cost is None else values * cost.bytes_per_value
    pulled = work.bytes * _PULLED.get(setting.codec, 0.5)
    served_s = _UPDATE_PASSES * work.bytes / min(figures.add_bytes_per_s, _MEMORY_BYTES_PER_S)
    packed_s = 0.0
    if cost is not None:
        served_s += values * cost.decode_s_per_value + cost.call_s
        # A worker decodes what it encoded, to compute the residual.
        packed_s = values * (cost.encode_s_per_value + cost.decode_s_per_value) + 2 * cost.call_s
    hosts = [int(host) for host in figures.host_numbers]
    home = hosts[0]
    travels_s: list[float] = []
    for host in hosts:
        there, back = figures.bytes_per_s[host][home], figures.bytes_per_s[home][host]
        words_s = _WORDS * (figures.latency_s[host][home] + figures.latency_s[home][host]) / 2
        travels_s.append(pushed / there + pulled / back + words_s + packed_s + served_s)
    tickets_s = [span + travel_s for span, travel_s in zip(spans, travels_s, strict=True)]
    rates = [1 / max(span, 1e-9) for span in tickets_s]
    here = sum(rate for rate, host in zip(rates, hosts, strict=True) if host == home)
    # Traffic from other hosts shares the link of the servers' host.
    away = min(
        sum(rates) - here,
        figures.receive_bytes_per_s[home] / max(pushed, 1),
        figures.send_bytes_per_s[home] / max(pulled, 1),
    )
    # Serving uses CPU time of the workers on the servers' host.
    here *= max(1 - away * served_s, 0.0)
    oldest = (staleness + 1) * figures.size / max(*tickets_s, 1e-9)
    tickets_per_s = min(here + away, oldest, 1 / max(served_s, 1e-9))
    usual_s = sum(r * span for r, span in zip(rates, travels_s, strict=True)) / sum(rates)
    step_s = figures.size / tickets_per_s
    return AsyncForecast(step_s=step_s, exchange_s=min(usual_s, step_s), sent_bytes=pushed)


_MANY = 20
"""A run of unknown length is taken to be long."""
_LONG_STEPS = 20_000
ASYNCHRONOUS_S = 10.0
"""Start-up of asynchronous training: servers and workers are new processes, which load everything again."""


class MethodSetting(FiniteFigures):
    """One communication method with its parameters."""

    method: str
    codec: str = "none"
    bucket_bytes: int = Field(default=25 << 20, gt=0)
    every: int = Field(default=1, ge=1)
    """Steps between two exchanges of local methods."""
    delay_steps: int = Field(default=0, ge=0)
    """Steps that an exchange of a local method may take in the background."""
    rank: int = Field(default=4, ge=1)
    """Rank of PowerSGD."""

    @property
    def name(self) -> str:
        """As people read it: ``local int4, every 8 steps``."""
        parts = [self.method if self.codec == "none" else f"{self.method} {self.codec}"]
        if self.codec == "powersgd":
            parts[0] += f" rank {self.rank}"
        if METHODS[self.method].kind == "local":
            parts.append(f"every {self.every} steps")
        if self.delay_steps:
            parts.append("in the background")
        return ", ".join(parts)


class StepForecast(FiniteFigures):
    """Predicted step under one setting."""

    setting: MethodSetting
    step_s: float
    """Mean, including warm-up."""
    exchange_s: float
    """Exchanges of the step, overlapped or not."""
    hidden_s: float
    """Part of them that overlaps with compute."""
    bytes_per_step: float
    """Sent by one worker."""
    steps_factor: float
    one_exchange_s: float
    """A single exchange, as it can be timed: of all buckets, or of one averaging."""
    begin_s: float = 0.0
    """Start-up cost, spread over the remaining steps."""

    @property
    def cost_s(self) -> float:
        """Time for the progress of one dense synchronous step: settings are compared by this."""
        return self.step_s * self.steps_factor + self.begin_s


def forecast(clock: Clock, work: SharedWork, setting: MethodSetting) -> StepForecast:
    """Predict a step under one setting."""
    kind = METHODS[setting.method].kind
    result = {"synchronous": _synchronous, "local": _local, "asynchronous": _asynchronous}[kind](
        clock, work, setting
    )
    return _warmed_up(clock, work, result)


def split_buckets(work: SharedWork, bucket_bytes: int) -> tuple[int, ...]:
    """Buckets of gradients, in order; a larger gradient is a bucket of its own."""
    buckets: list[int] = []
    for size in work.gradient_bytes:
        if buckets and buckets[-1] + size <= bucket_bytes:
            buckets[-1] += size
        else:
            buckets.append(size)
    return tuple(buckets)


def _synchronous(clock: Clock, work: SharedWork, setting: MethodSetting) -> StepForecast:
    compute_s, backward_s = _computing(clock, work)
    buckets = split_buckets(work, setting.bucket_bytes)
    spans = [_exchange(clock, work, setting, size) for size in buckets]
    exchange_s = sum(span.seconds for span in spans)
    ready, ended = 0, 0.0
    for size, span in zip(buckets, spans, strict=True):
        ready += size
        # Gradients become ready in proportion to the size of their weights.
        begins = max(ended, backward_s * ready / max(work.bytes, 1))
        ended = begins + span.seconds
    hidden = max(exchange_s - max(ended - backward_s, 0.0), 0.0) * work.hides
    return _make(
        clock,
        work,
        setting,
        compute_s=compute_s,
        exchange_s=exchange_s,
        hidden_s=hidden,
        sent_bytes=sum(span.sent_bytes for span in spans),
    )


def _local(clock: Clock, work: SharedWork, setting: MethodSetting) -> StepForecast:
    compute_s, _ = _computing(clock, work)
    span = _exchange(clock, work, setting, work.bytes)
    hidden = min(span.seconds, setting.delay_steps * compute_s) * work.hides
    item = setting.every
    result = _make(
        clock,
        work,
        setting,
        compute_s=compute_s,
        exchange_s=span.seconds / item,
        hidden_s=hidden / item,
        sent_bytes=span.sent_bytes / item,
    )
    return result.model_copy(update={"one_exchange_s": span.seconds})


def _asynchronous(clock: Clock, work: SharedWork, setting: MethodSetting) -> StepForecast:
    """No worker waits for another: the total number of steps of all workers counts."""
    result = forecast_async(clock.figures, work, setting, staleness=work.staleness)
    forecast = _make(
        clock,
        work,
        setting,
        compute_s=result.step_s - result.exchange_s,
        exchange_s=result.exchange_s,
        hidden_s=0.0,
        sent_bytes=result.sent_bytes,
    )
    return forecast.model_copy(update={"begin_s": ASYNCHRONOUS_S / (work.steps or _LONG_STEPS)})


def _warmed_up(clock: Clock, work: SharedWork, forecast: StepForecast) -> StepForecast:
    setting = forecast.setting
    if setting.codec != "onebit" or METHODS[setting.method].kind != "synchronous":
        return forecast
    if clock.figures.codec(BEFORE_ONE_BIT) is None:
        return forecast
    before = _synchronous(clock, work, setting.model_copy(update={"codec": BEFORE_ONE_BIT}))
    steps = work.steps or work.memory_steps * _MANY
    share = min(one_bit_from(steps, memory_steps=work.memory_steps) / steps, 1.0)

    def mixed(read: Callable[[StepForecast], float]) -> float:
        return share * read(before) + (1 - share) * read(forecast)

    return forecast.model_copy(
        update={
            "step_s": mixed(lambda item: item.step_s),
            "exchange_s": mixed(lambda item: item.exchange_s),
            "hidden_s": mixed(lambda item: item.hidden_s),
            "bytes_per_step": mixed(lambda item: item.bytes_per_step),
        }
    )


def _make(
    clock: Clock,
    work: SharedWork,
    setting: MethodSetting,
    *,
    compute_s: float,
    exchange_s: float,
    hidden_s: float,
    sent_bytes: float,
) -> StepForecast:
    step = compose_step(
        micros=1.0,
        own_s=compute_s,
        stage_s=compute_s,
        slowest_s=compute_s,
        data_s=exchange_s - hidden_s,
    )
    return StepForecast(
        setting=setting,
        step_s=step.total_s,
        exchange_s=exchange_s,
        hidden_s=hidden_s,
        bytes_per_step=sent_bytes,
        one_exchange_s=exchange_s,
        steps_factor=steps_factor(
            setting.method,
            setting.codec,
            every=setting.every,
            delay_steps=setting.delay_steps,
            workers=clock.figures.size,
            steps=work.steps,
        ),
    )


def _computing(clock: Clock, work: SharedWork) -> tuple[float, float]:
    """Step and last backward pass of the slowest worker."""
    compute_s = clock.figures.slowest_compute_s or work.compute_s
    return compute_s, compute_s * min(work.backward_s / work.compute_s, 1.0)


def _exchange(clock: Clock, work: SharedWork, setting: MethodSetting, size_bytes: float) -> Span:
    span = _pass_on(clock, work, setting, size_bytes)
    if setting.method == "all-reduce" or work.staging_bytes_per_s is None:
        return span
    staged_s = 2 * size_bytes / work.staging_bytes_per_s
    return Span(span.seconds + staged_s, span.sent_bytes)


def _pass_on(clock: Clock, work: SharedWork, setting: MethodSetting, size_bytes: float) -> Span:
    is_synchronous = METHODS[setting.method].kind == "synchronous"
    method = setting.method if is_synchronous else "direct"
    if setting.codec == "none":
        return clock.sum_s(method, size_bytes)
    cost = clock.figures.codec(setting.codec)
    if setting.codec == "powersgd":
        return _low_rank(clock, work, setting, method, size_bytes)
    assert cost is not None, f"{setting.codec} was not measured"
    return clock.compressed_s(cost, size_bytes)


def _low_rank(
    clock: Clock, work: SharedWork, setting: MethodSetting, method: str, size_bytes: float
) -> Span:
    """Two low-rank factors, one after the other; other weights are sent dense with the first."""
    share = size_bytes / max(work.bytes, 1)
    full = _VALUE_BYTES * sum(rows * columns for rows, columns in work.matrices)
    rows = _VALUE_BYTES * setting.rank * sum(rows for rows, _ in work.matrices)
    columns = _VALUE_BYTES * setting.rank * sum(columns for _, columns in work.matrices)
    first = clock.sum_s(method, share * (rows + work.bytes - full))
    second = clock.sum_s(method, share * columns)
    cost = clock.figures.codec("powersgd")
    spent = 0.0
    if cost is not None:
        per_value = cost.encode_s_per_value + cost.decode_s_per_value
        spent = (
            share * full / _VALUE_BYTES * per_value + 2 * len(work.matrices) * cost.call_s * share
        )
    return Span(first.seconds + second.seconds + spent, first.sent_bytes + second.sent_bytes)
