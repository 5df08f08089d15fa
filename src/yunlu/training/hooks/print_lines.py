"""The callback ``log``: what happens, as lines in the output of the worker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from yunlu.core.units import show_bytes, show_number
from yunlu.training.hooks.callback import Callback

if TYPE_CHECKING:
    from yunlu.runs.events import CheckpointSaved, Evaluated
    from yunlu.training.hooks.callback import CallbackContext


class PrintLines(Callback):
    """Writes a line per evaluation and checkpoint to standard error, which ``worker.log`` keeps."""

    def on_evaluation(self, evaluation: Evaluated, run: CallbackContext) -> None:
        """Where it was taken, and every figure."""
        figures = {"loss": evaluation.loss, **evaluation.metrics}
        shown = "  ".join(f"{name} {show_number(value)}" for name, value in figures.items())
        _print(f"step {evaluation.step}/{run.steps}  {evaluation.split}  {shown}")

    def on_checkpoint(self, checkpoint: CheckpointSaved, run: CallbackContext) -> None:
        """Where it is, and its size."""
        size = show_bytes(checkpoint.bytes)
        _print(f"step {checkpoint.step}/{run.steps}  saved {checkpoint.path}  {size}")


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
