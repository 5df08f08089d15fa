"""Metrics of a step: one record of ``metrics.jsonl``."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict, TypeGuard


class StepMetrics(TypedDict):
    """One record per step. After a resume a step may have two records: the later one is valid.

    A plain mapping, not a model: the worker writes one for each step. ``is_step`` checks what it reads.
    """

    step: int
    """Global step, counted from 1."""
    at: float
    """Seconds since the epoch, at the end of the step."""
    attempt: int
    """Number of the attempt (``AttemptStarted``) that made the step."""
    epoch: float
    """Epochs completed, as a fraction."""
    loss: float
    """Mean loss of the step over its true count."""
    lr: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    samples: int
    """Samples consumed so far."""
    items: float
    """Loss items (samples or tokens) of this step."""
    data_s: float
    """Waiting for data."""
    compute_s: float
    """Forward, backward, optimiser."""
    communication_s: float
    """Waiting for other workers."""
    evaluate_s: float
    """Evaluating after the step."""
    checkpoint_s: float
    """Stalled by a checkpoint."""
    memory_bytes: NotRequired[int]
    """Peak resident memory of the worker, or peak allocation on its device, so far."""
    tokens: NotRequired[int]
    """Tokens computed, padding included; where samples have lengths."""
    padding: NotRequired[int]
    """Of these, padding."""
    noise_scale: NotRequired[float]
    """Batch at which noise and signal of the gradient are equal; where measured."""
    noise_sqr: NotRequired[float]
    """Squared norm of the gradient without its noise, averaged over measurements."""
    noise_var: NotRequired[float]
    """Variance of one sample's gradient, averaged over measurements."""
    noise_parts: NotRequired[int]
    """Gradients of a step that were compared; 1: two consecutive steps, which is biased."""
    loss_scale: NotRequired[float]
    """Factor on the loss, under fp16."""
    low_share: NotRequired[float]
    """Share of parameters in low precision; where it may change."""
    exchange_s: NotRequired[float]
    """Gradient exchange, overlapped or not; where workers exchange gradients."""
    sent_bytes: NotRequired[float]
    """Sent to other workers by the one that writes the record."""
    compression_error: NotRequired[float]
    """Share of the gradient that compression left out."""
    staleness: NotRequired[float]
    """Mean number of updates that the step's gradients did not know of; asynchronous workers."""
    generation: NotRequired[int]
    """Generation of the worker group (``WorkerGroupFormed``) that made the step."""


def is_step(record: Any) -> TypeGuard[StepMetrics]:
    """Whether a record of the log is a step: a crash may have torn it."""
    return isinstance(record, dict) and isinstance(record.get("step"), int) and "at" in record
