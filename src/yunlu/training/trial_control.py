"""What a study decides about a trial while it runs: to go on, to be held, or to be pruned. Loads no torch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.limits import decode_json
from yunlu.runs.run_store import Document, read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore

PATIENCE_S = 5.0
"""How long a run waits at its last rung for a decision; then it saves, and frees its devices."""
_POLL_S = 0.01
_PARTICIPLES: dict[Literal["hold", "prune"], str] = {"prune": "pruned", "hold": "held"}


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """Decision to end a trial here: paused (``hold``) or for good (``prune``)."""

    kind: Literal["hold", "prune"]
    reason: str


class TrialControl:
    """Reads the decisions of the study, which may pause or prune the run between steps; used by one worker.

    The study runner writes the document ``trial_control.json`` of the run: ``until``, the evaluation up to
    which the run may go; ``hold`` or ``prune``, with the reason. The worker only reads it.
    """

    def __init__(self, run: RunStore, *, patience_s: float = PATIENCE_S) -> None:
        self._run, self._patience_s = run, patience_s
        about = read_json(run, Document.TRIAL) or {}
        self.saves: bool = about.get("saves", False)
        """Whether other trials may start from any of its evaluations."""
        self.is_copy: bool = about.get("is_copy", False)
        """Whether it started from another trial's checkpoint, with settings of its own."""
        self._version: tuple[int, ...] | None = None
        self._document: dict[str, Any] = {}

    def peek(self, rung: int) -> PruneDecision | None:
        """The current decision, if any; ``rung`` is the last evaluation of the run."""
        self._read()
        for kind, word in _PARTICIPLES.items():
            if kind in self._document:
                why = self._document[kind]
                return PruneDecision(kind, f"{word} at rung {rung}" + (f": {why}" if why else ""))
        return None

    def ask(self, rung: int, *, keep_waiting: Callable[[], bool]) -> PruneDecision | None:
        """The decision after an evaluation; at the last allowed rung, waits for it.

        ``keep_waiting`` returns false once the run is to stop for another reason.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            decision = self.peek(rung)
            if decision is not None or rung < self._document.get("until", math.inf):
                return decision
            if not keep_waiting():
                return None
            if time.monotonic() > deadline:
                return PruneDecision("hold", f"held at rung {rung}: no decision from the study")
            time.sleep(_POLL_S)

    def _read(self) -> None:
        """Reload the document if its version changed; called after every step."""
        stat = self._run.stat(Document.TRIAL_CONTROL)
        if stat is not None and stat.version != self._version:
            content = self._run.read(Document.TRIAL_CONTROL)
            self._document, self._version = decode_json(content or b"{}"), stat.version


def open_trial_control(run: RunStore) -> TrialControl | None:
    """The control of a run that is a trial; None for other runs."""
    return TrialControl(run) if run.has(Document.TRIAL) else None
