"""Weights & Biases; configured by the user with ``wandb login`` and ``WANDB_MODE``."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import TrainingError, missing_part
from yunlu.core.files import make_directory
from yunlu.core.secrets import mask_value
from yunlu.runs.run_store import Area, read_json, require_local
from yunlu.runs.states import RunState
from yunlu.training.trackers.tracker import public_config

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

PROJECT = "yunlu"
_DOCUMENT = "wandb.json"
"""Document of the run: its id at W&B."""
_FAILED = {RunState.FAILED, RunState.LOST}


class WandbTracker:
    """One W&B run per Yunlu run, in the project ``yunlu``; a resumed attempt continues it.

    After a crash the steps since the last checkpoint are logged again. W&B keeps the first
    values, which are the same: resuming is exact. Offline, each attempt is a directory
    of its own under the run's ``wandb/``, with the same id; ``wandb sync`` joins them.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Open the W&B run named after this run."""
        del resumed  # the stored id tells, also without a checkpoint
        try:
            import wandb  # noqa: PLC0415 (optional, and slow to import)
            from wandb.errors import UsageError  # noqa: PLC0415
        except ImportError as error:
            raise missing_part("wandb", "wandb", "Logging to Weights & Biases") from error
        # Silent for the whole process, before init: otherwise it would prompt for a key,
        # from a thread, in the middle of a progress bar.
        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings=settings)
        directory = require_local(run).directory(Area.TRACKERS)
        make_directory(directory)
        try:
            self._run = wandb.init(
                project=PROJECT,
                id=_id_of(run),
                name=run.id,
                config=public_config(job),
                dir=directory,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except UsageError as error:
            raise TrainingError(
                f"Weights & Biases cannot start: {error}",
                hint="run `wandb login`, or set WANDB_MODE=offline",
            ) from error

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Add the numbers to the step; W&B joins several calls for one step."""
        self._run.log(metrics, step=step)

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Write the final figures and close; waits until W&B has everything."""
        self._run.summary.update({**mask_value(summary), "state": state})
        self._run.finish(exit_code=1 if state in _FAILED else 0)


def _id_of(run: RunStore) -> str:
    """Id created in the first attempt and stored: run ids repeat between stores, W&B's must not."""
    known = read_json(run, _DOCUMENT)
    if known is not None:
        return known["id"]
    # W&B forbids a few signs in ids, and long ones.
    made = re.sub(r"[^A-Za-z0-9_.-]", "-", run.id)[:100] + f"-{secrets.token_hex(3)}"
    run.write(_DOCUMENT, json.dumps({"id": made}))
    return made
