"""Hung, cut off, or only slow: told apart by a clock that the test turns."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from yunlu.training.elastic.messages import Heartbeat
from yunlu.training.elastic.watchdog import STRAGGLER_STEPS, Deadlines, HealthVerdict, Watchdog

LIMITS = Deadlines()


class Sea:
    """Two or more members whose beats the test sends, tick by tick."""

    def __init__(self, workers: int = 2, node: str = "local") -> None:
        self.dog = Watchdog(LIMITS)
        self.now = 0.0
        self.stopped: set[int] = set()
        self.beats = {number: Heartbeat(generation=1, phase="step") for number in range(workers)}
        for number in self.beats:
            self.dog.watch(number, node=node, at=0)
        self.node = node
        self.dog.observe_node(node, at=0)

    def live(
        self, span_s: float, *, silent: set[int] | None = None, node: bool = True
    ) -> list[HealthVerdict]:
        found: list[HealthVerdict] = []
        until = self.now + span_s
        while self.now < until:
            self.now += 0.25
            for number, heartbeat in self.beats.items():
                if number not in (silent or set()):
                    self.dog.observe(number, heartbeat, at=self.now)
            if node:
                self.dog.observe_node(self.node, at=self.now)
            found += self.find_lost()
        return found

    def find_lost(self) -> list[HealthVerdict]:
        return self.dog.find_lost(
            at=self.now,
            is_stopped=lambda number: number in self.stopped,
            is_remote=lambda node: node != "local",
            busy=list(self.beats),
        )

    def move(self, number: int, **changes: Any) -> None:
        heartbeat = self.beats[number]
        self.beats[number] = heartbeat.model_copy(
            update={"progress": heartbeat.progress + 1, **changes}
        )

    def step(
        self, seconds: dict[int, float], waits: dict[int, float] | None = None
    ) -> list[HealthVerdict]:
        found: list[HealthVerdict] = []
        for number, step_s in seconds.items():
            wait_s = (waits or {}).get(number, 0.0)
            step = self.beats[number].step + 1
            self.move(number, step=step)
            heartbeat = self.beats[number].model_copy(update={"steps": ((step, step_s, wait_s),)})
            found += self.dog.observe(number, heartbeat, at=self.now)
        return found


def test_a_stopped_process_is_found_within_two_seconds() -> None:
    sea = Sea()
    assert not sea.live(5)
    sea.stopped = {1}
    (verdict, *_) = sea.live(2, silent={1})
    assert (verdict.worker, verdict.what) == (1, "hung")


def test_a_late_sign_of_life_on_a_busy_machine_is_no_fault() -> None:
    sea = Sea()
    assert not sea.live(LIMITS.silent_s - 1, silent={1})
    assert not sea.live(1)


def test_a_silent_process_is_hung_in_the_end() -> None:
    verdicts = Sea().live(LIMITS.silent_s + 0.5, silent={1})
    assert {verdict.worker for verdict in verdicts} == {1}


def test_a_node_that_falls_silent_as_a_whole_is_cut_off() -> None:
    sea = Sea(node="far")
    sea.live(3)
    verdicts = sea.live(LIMITS.node_silent_s + 0.5, silent={0, 1}, node=False)
    assert {(verdict.worker, verdict.what) for verdict in verdicts} == {
        (0, "cut off"),
        (1, "cut off"),
    }


def test_one_voice_is_enough_for_a_node_not_to_be_cut_off() -> None:
    sea = Sea(node="far")
    assert not sea.live(LIMITS.silent_s - 0.5, silent={0}, node=False)


def test_who_was_itself_asleep_does_not_blame_others() -> None:
    sea = Sea()
    sea.live(1)
    sea.now += 100
    assert not sea.find_lost()
    assert not sea.live(3)


def test_the_one_that_works_on_while_all_wait_is_stuck() -> None:
    sea = Sea(3)
    sea.move(0, phase="sync")
    sea.move(2, phase="sync")
    verdicts = sea.live(LIMITS.step_s + 0.5)
    assert {(verdict.worker, verdict.what) for verdict in verdicts} == {(1, "hung")}


def test_three_times_as_long_is_slow_and_not_stuck() -> None:
    sea = Sea()
    for _ in range(20):
        sea.step({0: 8.0, 1: 8.0})
    sea.move(0, phase="sync")
    assert not sea.live(24)


def test_an_evaluation_may_take_long_while_the_others_wait() -> None:
    sea = Sea()
    sea.move(0, phase="evaluate")
    assert not sea.live(LIMITS.long_s - 5)


def test_if_all_wait_nobody_is_killed() -> None:
    sea = Sea()
    for number in (0, 1):
        sea.move(number, phase="sync")
    verdicts = sea.live(LIMITS.step_s + 0.5)
    assert {verdict.what for verdict in verdicts} == {"stalled"}


def test_a_straggler_is_named_once_and_again_when_it_is_over() -> None:
    sea = Sea(4)
    slow = {0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0}
    # Everyone's step takes as long: what differs is how much of it was waiting.
    waits = {0: 0.5, 1: 0.5, 2: 0.0, 3: 0.5}
    told = [v for _ in range(3 * STRAGGLER_STEPS) for v in sea.step(slow, waits)]
    assert [(verdict.worker, verdict.what) for verdict in told] == [(2, "straggler")]
    told = [v for _ in range(3 * STRAGGLER_STEPS) for v in sea.step(dict.fromkeys(range(4), 1.0))]
    assert [(verdict.worker, verdict.what) for verdict in told] == [(2, "recovered")]


@given(st.lists(st.floats(0.05, 4.0), min_size=5, max_size=60))
def test_who_beats_and_steps_is_never_lost(pauses: list[float]) -> None:
    """Signs of life up to 4 s apart, steps at any pace: no verdict."""
    sea = Sea()
    for pause_s in pauses:
        assert not sea.live(pause_s, silent={1})
        assert not [v for v in sea.step({0: pause_s, 1: pause_s}) if v.what == "hung"]
        assert not sea.live(0.25)


def test_a_first_step_may_take_long_while_the_others_wait_for_it() -> None:
    sea = Sea()
    sea.move(0, phase="first step")
    sea.move(1, phase="sync")
    assert not sea.live(LIMITS.long_s - 5)


def test_another_generation_has_a_pace_of_its_own() -> None:
    sea = Sea()
    for _ in range(64):
        sea.step({0: 0.1, 1: 0.1})
    for number in (0, 1):
        sea.move(number, generation=2, phase="first step")
    assert not sea.live(100)
    assert sea.dog.usual_step_s == 0
    sea.step({0: 100.0, 1: 100.0})
    for number in (0, 1):
        sea.move(number, phase="step")
    assert not sea.live(300)
