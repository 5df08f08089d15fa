"""Inputs of training: a task with its data loaded and its model built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.tasks.task import Splits, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """A task with its data loaded and its model built."""

    task: Task
    model: nn.Module
    splits: Splits
