"""Trial control: waits only at the last rung, and holds the trial without a decision."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from yunlu.core.files import write_atomically
from yunlu.runs.run_store import Document, RunStore
from yunlu.training.trial_control import PruneDecision, TrialControl, open_trial_control

HOURS_S = 7200.0


def always() -> bool:
    return True


def say(run: RunStore, **verdict: Any) -> None:
    write_atomically(run.path / Document.TRIAL_CONTROL, json.dumps(verdict))


def make_control(run: RunStore, *, patience_s: float = HOURS_S) -> TrialControl:
    write_atomically(run.path / Document.TRIAL, "{}")
    return TrialControl(run, patience_s=patience_s)


def test_only_a_trial_has_a_control(make_run: Callable[..., RunStore]) -> None:
    run = make_run(steps=1)
    assert open_trial_control(run) is None
    (run.path / Document.TRIAL).write_text(json.dumps({"saves": True}))
    control = open_trial_control(run)
    assert control is not None
    assert control.saves
    assert control.ask(1, keep_waiting=always) is None  # without a word it goes to its end


def test_below_its_last_rung_it_never_waits(make_run: Callable[..., RunStore]) -> None:
    run = make_run(steps=1)
    control = make_control(run)
    say(run, until=3)
    assert control.ask(1, keep_waiting=always) is None
    assert control.ask(2, keep_waiting=always) is None
    say(run, prune="too slow")
    assert control.peek(2) == PruneDecision("prune", "pruned at rung 2: too slow")
    say(run, hold="")
    assert control.ask(2, keep_waiting=always) == PruneDecision("hold", "held at rung 2")


def test_at_its_last_rung_it_waits_for_a_word(make_run: Callable[..., RunStore]) -> None:
    run = make_run(steps=1)
    control = make_control(run)
    say(run, until=1)
    asked = threading.Event()

    def is_wanted() -> bool:
        asked.set()
        return True

    def answer() -> None:
        asked.wait()
        say(run, until=2)

    thread = threading.Thread(target=answer)
    thread.start()
    assert control.ask(1, keep_waiting=is_wanted) is None
    thread.join()
    assert asked.is_set()


def test_without_a_word_it_holds_and_a_stop_goes_first(make_run: Callable[..., RunStore]) -> None:
    run = make_run(steps=1)
    control = make_control(run, patience_s=0.02)
    say(run, until=1)
    decision = control.ask(1, keep_waiting=always)
    assert decision is not None
    assert (decision.kind, decision.reason) == (
        "hold",
        "held at rung 1: no decision from the study",
    )
    assert make_control(run).ask(1, keep_waiting=lambda: False) is None
