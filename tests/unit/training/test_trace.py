"""The trace: only its own steps, true to their time, and nothing else changed by it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.sample_events import EventT
from yunlu.runs.events import TraceWritten, WarningRaised
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, RunStore
from yunlu.training import trace
from yunlu.training.trace import PHASES, StepTrace, choose_window, with_ranges


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return open_run(tmp_path)


class Small:
    """What the trace sees of an engine."""

    def __init__(self, steps: int) -> None:
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.task = SimpleNamespace(loss=lambda model, batch: model(batch).square().sum())
        self.precision = SimpleNamespace(backward=lambda loss: loss.backward())
        self.steps = steps

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(4, 8)

    def norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        batches = self.batches()
        for _ in range(self.steps):  # as in the loop, the end is not asked for
            batch = next(batches)
            self.precision.backward(self.task.loss(self.model, batch))
            self.norm()
            self.update()


def train(run: RunStore, *, steps: int, first_step: int, traced_steps: int) -> Small:
    engine = Small(steps)
    with (
        ExitStack() as ranges,
        StepTrace(run, first_step=first_step, steps=traced_steps) as watched,
    ):
        ranges.enter_context(with_ranges(engine, watched))  # pyright: ignore[reportArgumentType]
        watched.on_done = ranges.close
        engine.train()
    return engine


def events_of(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def drawn(run: RunStore) -> list[dict[str, Any]]:
    with gzip.open(run.path / Area.TRACES / "trace.json.gz", "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_the_trace_holds_its_own_steps_with_every_phase_in_its_place(run: RunStore) -> None:
    train(run, steps=9, first_step=4, traced_steps=2)

    events = drawn(run)
    spans = {
        name: [(each["ts"], each["ts"] + each["dur"]) for each in events if each["name"] == name]
        for name in [f"yunlu.{phase}" for phase in PHASES]
    }
    assert {name: len(each) for name, each in spans.items()} == dict.fromkeys(spans, 2)
    for one, after in pairwise(PHASES):
        assert spans[f"yunlu.{one}"][0][1] <= spans[f"yunlu.{after}"][0][0]
    assert sum(each["name"] == "aten::addmm" for each in events) == 2
    (event,) = events_of(run, TraceWritten)
    assert (event.path, event.steps, event.first_step) == ("traces/trace.json.gz", 2, 4)


def test_the_table_accounts_for_all_the_time_of_the_steps(run: RunStore) -> None:
    train(run, steps=8, first_step=3, traced_steps=3)

    (event,) = events_of(run, TraceWritten)
    phases = {row.name: row for row in event.phases}
    assert [*phases] == [*PHASES, "other"]
    assert sum(row.total_s for row in phases.values()) == pytest.approx(event.wall_s)
    assert sum(row.share for row in phases.values()) == pytest.approx(1)
    assert min(row.share for row in phases.values()) > 0
    rows = event.table
    assert [row.self_s for row in rows] == sorted((r.self_s for r in rows), reverse=True)
    assert sum(row.self_s for row in rows) <= event.wall_s * 1.001
    assert {row.name: row.calls for row in rows}["aten::addmm"] == 3
    assert "outside operators (update)" in {row.name for row in rows}


def test_afterwards_the_engine_is_what_it_was(run: RunStore) -> None:
    fresh = Small(1)
    engine = train(run, steps=6, first_step=2, traced_steps=1)

    assert set(vars(engine)) == set(vars(fresh))
    assert engine.update.__func__ is Small.update
    assert not hasattr(engine.precision.backward, "__wrapped__")


def test_objects_that_cannot_be_wrapped_are_traced_without_their_ranges(run: RunStore) -> None:
    class Sealed:
        __slots__ = ()

        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().sum()

    engine = Small(5)
    engine.task = Sealed()  # type: ignore[assignment]
    with StepTrace(run, first_step=2, steps=1) as watched, with_ranges(engine, watched):  # pyright: ignore[reportArgumentType]
        engine.train()

    (event,) = events_of(run, TraceWritten)
    assert {row.name: row.total_s for row in event.phases}["forward"] == 0
    assert event.steps == 1


@pytest.mark.parametrize(("steps", "traced_steps"), [(4, 1), (5, 2), (6, 3), (9, 3)])
def test_a_run_that_ends_early_has_the_steps_it_did(
    run: RunStore, steps: int, traced_steps: int
) -> None:
    train(run, steps=steps, first_step=4, traced_steps=3)

    assert events_of(run, TraceWritten)[0].steps == traced_steps


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_ends_before_the_first_traced_step_says_so(run: RunStore, steps: int) -> None:
    train(run, steps=steps, first_step=4, traced_steps=2)

    assert events_of(run, TraceWritten) == []
    assert "ended before its step 4" in events_of(run, WarningRaised)[0].message


def test_a_very_long_trace_keeps_its_longest_events(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_MOST_EVENTS", 25)
    train(run, steps=6, first_step=2, traced_steps=3)

    events = drawn(run)
    assert len(events) == 25
    assert {"yunlu.update", "yunlu.forward"} <= {each["name"] for each in events}
    (event,) = events_of(run, TraceWritten)
    assert {row.name: row.calls for row in event.table}["aten::addmm"] == 3


def test_a_trace_that_cannot_be_written_costs_the_file_and_not_the_run(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    train(run, steps=6, first_step=2, traced_steps=1)

    assert "No space left on device" in events_of(run, WarningRaised)[0].message
    (event,) = events_of(run, TraceWritten)
    assert event.path is None
    assert event.table
    assert [path.name for path in run.path.rglob("*") if path.is_file()] == ["events.jsonl"]


def plan_of(**parts: int) -> Any:
    usual = {"steps": 100, "accumulation": 1, "evaluate_every": 0, "checkpoint_every": 100}
    return SimpleNamespace(**(usual | parts))


@given(
    steps=st.integers(1, 400),
    done=st.integers(0, 400),
    evaluate_every=st.integers(0, 60),
    checkpoint_every=st.integers(1, 60),
    accumulation=st.integers(1, 40),
)
def test_the_window_lies_within_the_attempt_and_avoids_pauses_where_it_can(
    steps: int, done: int, evaluate_every: int, checkpoint_every: int, accumulation: int
) -> None:
    pauses = [each for each in (evaluate_every, checkpoint_every) if each]
    plan = plan_of(
        steps=steps,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        accumulation=accumulation,
    )
    window = choose_window(plan, steps_done=done)
    if steps - done < 2:
        assert window is None
        return
    assert window is not None
    first, count = window
    assert first >= 2
    assert count >= 1
    assert done + first + count - 1 <= steps
    covered = range(done + first, done + first + count)
    if any(step % each == 0 for step in covered for each in pauses):
        # Then no place within reach would have been quiet.
        last = min(first + 200, steps - done - count + 1)
        assert all(
            any((done + start + i) % each == 0 for i in range(count) for each in pauses)
            for start in range(first, last + 1)
        )
