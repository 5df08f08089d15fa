"""Ways that predictions cannot tell apart are tried: the faster one stays, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.test_communication import STEPS, Recorder, alone, build
from tests.even_links import make_even
from tests.training_device import device_of
from yunlu.planning.communication import method_choice
from yunlu.planning.communication.timing import WireFigures
from yunlu.planning.layouts import Layout
from yunlu.runs.events import CommunicationChosen
from yunlu.training import loop
from yunlu.training.communication import method_selector
from yunlu.training.communication.allreducer import TorchAllReducer
from yunlu.training.communication.method_selector import MethodSelector
from yunlu.training.parallel.world import World, form_world

pytestmark = pytest.mark.distributed

EACH = 6
"""Steps of a trial, of each way."""


class Clock:
    """A step takes what the way in use is said to take; each worker has its own opinion."""

    def __init__(self, torch_s: float, ours_s: float) -> None:
        self._torch_s, self._ours_s = torch_s, ours_s
        self.engine: Any = None
        self._now = 0.0

    def __call__(self) -> float:
        allreducer = self.engine.communication.communicator.allreducer
        self._now += self._torch_s if isinstance(allreducer, TorchAllReducer) else self._ours_s
        return self._now


class Ways(Recorder):
    """By which sums each step was made."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.ways: list[bool] = []

    def after_step(self, step: loop.Step) -> bool:
        allreducer = self.engine.communication.communicator.allreducer
        self.ways.append(isinstance(allreducer, TorchAllReducer))
        return super().after_step(step)


@contextmanager
def slow_choice(measure: Callable[..., WireFigures], clock: Clock) -> Iterator[None]:
    """Slow links, on which every choice is close enough to be timed, by a clock of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MethodSelector, "_measure", measure)
        patch.setattr(method_choice, "_LEAST_STEPS", 1)
        patch.setattr(method_choice, "_DOUBT", 1e9)
        patch.setattr(method_selector, "STEPS_PER_METHOD", EACH)
        patch.setattr(method_selector, "_TIMED_STEPS", EACH - 2)
        patch.setattr(method_selector, "perf_counter", clock)
        yield


def _try(
    rank: int, path: str, seconds: list[tuple[float, float]], way: str
) -> tuple[list[float], list[int], list[bool], list[Any]]:
    world = form_world(
        Layout(dp=2),
        rank,
        dist.FileStore(path, 2),
        secret=b"test",
        device=device_of(rank),
        host=f"127.0.0.{rank + 1}",
    )
    told: list[tuple[int, str, str]] = []

    def tell(event: CommunicationChosen) -> None:
        told.append((event.step, event.setting.method, event.reason))

    def measure(_self: MethodSelector, world: World) -> WireFigures:
        return make_even(world.hosts, latency_s=1e-4, bytes_per_s=1e4)

    clock = Clock(*seconds[rank])
    with slow_choice(measure, clock):
        engine = build(world, way, tell=tell)
        clock.engine = engine
        seen = Ways(engine)
        loop.run(engine, seen)
        engine.close()
    world.close()
    return seen.losses, seen.digests, seen.ways, told


# The workers differ: what counts is the mean, which is the same for all.
TORCH_WINS = [(1.0, 3.0), (2.0, 1.5)]
OURS_WIN = [(3.0, 1.0), (1.5, 2.0)]


@pytest.mark.parametrize(("seconds", "torch_wins"), [(TORCH_WINS, True), (OURS_WIN, False)])
def test_the_faster_of_two_stays_and_all_train_as_one_process(
    tmp_path: Path, seconds: list[tuple[float, float]], torch_wins: bool
) -> None:
    everyone = run_ranks(_try, 2, str(tmp_path / "store"), seconds, "auto")
    first = everyone[0][2][0]
    for losses, digests, ways, _ in everyone:
        assert losses == pytest.approx(alone(), abs=1e-5)
        assert digests == everyone[0][1]
        rest = [torch_wins] * (STEPS - 2 * EACH)
        assert ways == [first] * EACH + [not first] * EACH + rest
    told = everyone[0][3]
    assert everyone[1][3] == []  # one speaks for all
    assert [step for step, _, _ in told] == [0, EACH, 2 * EACH]
    assert (told[-1][1] == "all-reduce") == torch_wins
    assert "timed against" in told[1][2]
    assert "a step" in told[-1][2]


def test_what_the_job_names_is_not_left_to_the_clock(tmp_path: Path) -> None:
    for _, _, ways, told in run_ranks(_try, 2, str(tmp_path / "store"), TORCH_WINS, "ring"):
        assert len(set(ways)) == 1
        assert len(told) <= 1


def _left_alone(rank: int, path: str) -> tuple[list[float], list[str]]:
    """The other worker leaves while two methods are compared: there is nothing to compare any more."""
    world = form_world(
        Layout(dp=2),
        rank,
        dist.FileStore(path, 2),
        secret=b"test",
        device=device_of(rank),
        host=f"127.0.0.{rank + 1}",
    )
    reasons: list[str] = []

    def measure(_self: MethodSelector, world: World) -> WireFigures:
        return make_even(world.hosts, latency_s=1e-4, bytes_per_s=1e4)

    clock = Clock(1.0, 3.0)
    with slow_choice(measure, clock):
        engine = build(world, "auto", tell=lambda event: reasons.append(event.reason))
        clock.engine = engine
        seen = Recorder(engine, until=2)
        loop.run(engine, seen)
        if rank == 0:
            alone_world = form_world(
                Layout(), 0, dist.FileStore(f"{path}-alone", 1), secret=b"test", device=device_of(0)
            )
            engine.rejoin(alone_world, micro_batch=2)
            seen.until = STEPS
            loop.run(engine, seen)
            alone_world.close()
        engine.close()
    world.close()
    return seen.losses, reasons


def test_who_is_left_alone_compares_no_more(tmp_path: Path) -> None:
    (losses, reasons), (first, _) = run_ranks(_left_alone, 2, str(tmp_path / "store"))
    assert losses == pytest.approx(alone(), abs=1e-5)
    assert len(first) == 2
    assert len(reasons) == 1
