"""The gate of a trial: between steps its study may hold the run, or give it up.

Whoever conducts the study writes the document ``trial_control.json`` of the run: ``until``, the evaluation
up to which the run may go; ``hold`` or ``prune``, with the reason. The worker only reads.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from yunlu.runs.documents import read_json
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore

PATIENCE_S = 5.0
"""How long a run waits at its last rung for another word; then it saves, and frees its devices."""
_LOOK_S = 0.01
_WORDS: dict[Literal["hold", "prune"], str] = {"prune": "pruned", "hold": "held"}


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The run ends here: to go on later, or for good."""

    kind: Literal["hold", "prune"]
    reason: str


class TrialControl:
    """Reads what the study decided; one worker of a run asks it."""

    def __init__(self, run: RunStore, *, patience_s: float = PATIENCE_S) -> None:
        self._run, self._patience_s = run, patience_s
        about = read_json(run, Document.TRIAL) or {}
        self.saves: bool = about.get("saves", False)
        """Whether others may begin from any of its evaluations."""
        self.is_copy: bool = about.get("is_copy", False)
        """Whether it began from the checkpoint of another, with rules of its own."""
        self._version: tuple[int, ...] | None = None
        self._verdict: dict[str, Any] = {}

    def peek(self, rung: int) -> PruneDecision | None:
        """What was decided meanwhile; ``rung`` is the last evaluation of the run."""
        self._read()
        for kind, word in _WORDS.items():
            if kind in self._verdict:
                why = self._verdict[kind]
                return PruneDecision(kind, f"{word} at rung {rung}" + (f": {why}" if why else ""))
        return None

    def ask(self, rung: int, *, is_wanted: Callable[[], bool]) -> PruneDecision | None:
        """After an evaluation: whether the run ends here. At its last rung this waits for a word.

        ``is_wanted`` ends the waiting where somebody else wants to end the run.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            ruling = self.peek(rung)
            if ruling is not None or rung < self._verdict.get("until", math.inf):
                return ruling
            if not is_wanted():
                return None
            if time.monotonic() > deadline:
                return PruneDecision("hold", f"held at rung {rung}: nobody said how it goes on")
            time.sleep(_LOOK_S)

    def _read(self) -> None:
        """Asked after every step: a file that is the same as before is not opened."""
        stat = self._run.stat(Document.TRIAL_CONTROL)
        if stat is not None and stat.version != self._version:
            content = self._run.read(Document.TRIAL_CONTROL)
            self._verdict, self._version = json.loads(content or b"{}"), stat.version


def open_trial_control(run: RunStore) -> TrialControl | None:
    """The gate of a run that is a trial; others have none."""
    return TrialControl(run) if run.has(Document.TRIAL) else None
