"""Forecast of a step under one communication method: exposed and overlapped time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from yunlu.planning.communication.async_forecast import forecast_async
from yunlu.planning.communication.methods import (
    BEFORE_ONE_BIT,
    METHODS,
    one_bit_from,
    steps_factor,
)
from yunlu.planning.communication.timing import Clock, Span
from yunlu.planning.machine_profile import FiniteFigures
from yunlu.planning.predict.step_parts import compose_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.planning.communication.measurements import SharedWork

_VALUE_BYTES = 4
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
