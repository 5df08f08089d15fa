"""The callback ``csv``: evaluations as a table that a spreadsheet opens."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.training.hooks.callback import Callback

if TYPE_CHECKING:
    from yunlu.runs.events import Evaluated
    from yunlu.training.hooks.callback import CallbackContext

FILE = "evaluations.csv"


class CsvTable(Callback):
    """Writes ``evaluations.csv`` in the run's directory: a row per metric of each evaluation."""

    def on_evaluation(self, evaluation: Evaluated, run: CallbackContext) -> None:
        """Append to the table; a later attempt continues it."""
        path = Path(run.address) / FILE
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not path.exists():
            writer.writerow(("step", "split", "metric", "value"))
        figures = {"loss": evaluation.loss, **evaluation.metrics}
        writer.writerows(
            (evaluation.step, evaluation.split, name, value) for name, value in figures.items()
        )
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())
