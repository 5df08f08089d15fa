"""Composition of a step from its terms, whatever their source: the one step-time model. Pure.

Terms come from fitted formulas (``step_time``), from counted operators (``local``), from timed passes
(``splitting.time_step``) or, while workers choose how to communicate, from measured links
(``communication.step_forecast``); numbers or columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, each a number or a column; the parts add up."""

    compute_s: Any
    tp_s: Any
    pp_bubble_s: Any
    dp_s: Any
    """Exposed part of data-parallel or sharded communication."""
    optimizer_s: Any
    input_s: Any
    other_s: Any

    @property
    def total_s(self) -> Any:
        """All parts."""
        return (
            self.compute_s
            + self.tp_s
            + self.pp_bubble_s
            + self.dp_s
            + self.optimizer_s
            + self.input_s
            + self.other_s
        )

    @property
    def parts(self) -> dict[str, Any]:
        """By component."""
        return {name: getattr(self, f"{name}_s") for name in STEP_PARTS}


STEP_PARTS = tuple(field.name.removesuffix("_s") for field in fields(StepTime))


def compose_step(
    *,
    micros: Any,
    own_s: Any,
    stage_s: Any,
    slowest_s: Any,
    pipe_s: Any = 0.0,
    waiting: Any = 0.0,
    data_s: Any = 0.0,
    optimizer_s: Any = 0.0,
    input_s: Any = 0.0,
    other_s: Any = 0.0,
) -> StepTime:
    """Micro-batches through the stages of a pipeline, then communication, update, input and the rest.

    Args:
        micros: Micro-batches of a replica.
        own_s: Compute of one micro-batch in a stage.
        stage_s: The same with its tensor-parallel messages.
        slowest_s: Of the stage that sets the pace.
        pipe_s: Messages of one micro-batch between stages.
        waiting: Passes of a stage that a device waits while the pipeline fills and drains:
            (pp - 1) / stages per device (Narayanan et al. 2021, section 2.2).
        data_s: Communication between replicas that nothing hides.
        optimizer_s: The update.
        input_s: Fetching of samples.
        other_s: Overhead of the engine.
    """
    busy_s, compute_s = micros * stage_s, micros * own_s
    return StepTime(
        compute_s=compute_s,
        tp_s=busy_s - compute_s,
        pp_bubble_s=micros * (slowest_s - stage_s + pipe_s) + waiting * (stage_s + pipe_s),
        dp_s=data_s,
        optimizer_s=optimizer_s,
        input_s=input_s,
        other_s=other_s,
    )
