"""The scheduler driven at random through faults: no run lost, none run twice at once, no device leaked.

The seed of a failing course is in its name; ``YUNLU_SEED=7`` drives that one course.
"""

import errno
import os
import random

import pytest

from tests.unit.scheduler.market_world import MarketWorld
from tests.unit.scheduler.world import Killed
from yunlu.core.errors import StoreError
from yunlu.runs.events import StateChanged
from yunlu.runs.states import RunState
from yunlu.scheduler import run_registry as register_module
from yunlu.scheduler.allocation_record import MOST_FAILURES
from yunlu.scheduler.autoscaling import ScalingRules
from yunlu.scheduler.policies import open_estimator, open_policy
from yunlu.scheduler.queue import change_entry, read_entry
from yunlu.scheduler.run_progress import SpeedEstimates
from yunlu.scheduler.scaling import Scaler

SEEDS = [int(os.environ["YUNLU_SEED"])] if "YUNLU_SEED" in os.environ else range(6)
TURNS = 150
CALM = 600
PRICES = {"cpu": 2.0, "cpu-spot": 0.5}
RULES = ScalingRules(grow_after_s=2.0, idle_s=10.0, least_life_s=5.0)


class Course:
    """One random course of events."""

    curses = 0.1
    """Runs that crash before their first step."""

    def __init__(self, world, make_scheduler, seed):
        self.world, self.chance = world, random.Random(seed)
        # Every fourth course is steered by the pool's own policy, the others by a nervous one.
        self.make = lambda: make_scheduler(world, round_s=5.0, **self.choose_policy(seed % 4 == 3))
        self.runs = {}
        self.is_calm = False
        self.services = 1
        self.scheduler = self.make()
        world.meddle = self.meddle

    @staticmethod
    def choose_policy(is_own):
        if not is_own:
            return {}
        return {"policy": open_policy("yunlu"), "make_estimator": open_estimator}

    def go(self):
        for _ in range(TURNS):
            self.happen()
            self.turn()
        self.calm_down()
        for _ in range(CALM):
            self.turn()
            if not self.unfinished() and not self.world.processes:
                break
        self.scheduler.step()
        self.judge_end()

    def happen(self):
        world, draw = self.world, self.chance.random()
        if draw < 0.25 and len(self.runs) < 14:
            least = self.chance.choice([1, 1, 1, 2])
            name = f"run-{len(self.runs)}"
            most = self.chance.choice([least, 2, 4])
            self.runs[name] = world.submit(name, least=least, most=max(least, most))
            if self.chance.random() < self.curses:
                world.cursed.add(name)
        elif draw < 0.35 and self.runs:
            self.wish(self.chance.choice([*self.runs.values()]))
        elif draw < 0.40:
            world.wall += self.chance.choice([-86_400, -60, 60, 86_400])
        elif draw < 0.44 and len(world.dead) + 1 < len(world.machines):
            world.break_machine(
                self.chance.choice([n for n in world.machines if n not in world.dead])
            )
        elif draw < 0.55 and world.dead:
            world.dead.remove(self.chance.choice([*sorted(world.dead)]))

    def meddle(self):
        """A verb, in the middle of the service's turn."""
        if self.runs:
            self.wish(self.chance.choice([*self.runs.values()]))

    def wish(self, run):
        entry = read_entry(run)
        wish = self.chance.choice(["run", "run", "pause", "stop"])
        ticket = entry.ticket + (wish == "run" and entry.wish != "run")
        change_entry(run, wish=wish, ticket=ticket, priority=self.chance.choice([0, 0, 3]))

    def turn(self):
        try:
            self.scheduler.step()
        except Killed:
            self.restart()
        else:
            if not self.is_calm and self.chance.random() < 0.03:
                self.restart()
        self.world.tick()
        self.world.check()
        self.judge()

    def restart(self):
        self.services += 1
        self.world.kill_service()
        self.scheduler = self.make()

    def judge(self):
        assert not self.world.violations
        claimed = dict.fromkeys(self.world.machines, 0)
        for scheduled in self.scheduler.registry.scheduled_runs.values():
            for name, count in scheduled.allocation.claims.items():
                claimed[name] += count
        if not self.scheduler.registry.scheduled_runs:
            return  # a service that has not looked yet
        for name, count in claimed.items():
            if name not in self.world.dead:
                assert count <= self.world.machines[name], f"{name} is promised {count} times"

    def calm_down(self):
        self.is_calm = True
        self.world.meddle = None
        self.world.kills = self.world.crashes = 0.0
        self.world.dead.clear()
        for run in self.runs.values():
            if read_entry(run).wish != "run":
                change_entry(run, wish="run", ticket=read_entry(run).ticket + 1)

    def state(self, run):
        told = [e.state for e, _ in run.read_events() if isinstance(e, StateChanged)]
        return RunState(told[-1])

    def is_over(self, run):
        state = self.state(run)
        given_up = bool(register_module.read_allocation(run).given_up)
        return state is RunState.FINISHED or (state is RunState.FAILED and given_up)

    def unfinished(self):
        return [run.id for run in self.runs.values() if not self.is_over(run)]

    def judge_end(self):
        assert not self.unfinished(), "a run is lost"
        assert not self.world.processes
        assert not self.scheduler.registry.scheduled_runs
        codes = {line["code"] for line in self.scheduler.pool_store.read_decisions("")}
        assert "trouble" not in codes, "a policy failed"
        for run in self.runs.values():
            assert register_module.read_allocation(run).claims == {}, "a device is leaked"


class MarketCourse(Course):
    """The same with spot machines that are taken away, deadlines, and machines that come and go."""

    curses = 0.0

    def __init__(self, world, make_scheduler, seed):
        super().__init__(world, make_scheduler, seed)
        self.make = lambda: make_scheduler(
            world,
            scaler=Scaler(world, RULES, prices=PRICES),
            round_s=3.0,
            prices=PRICES,
            **self.choose_policy(seed % 4 != 0),
        )
        self.scheduler = self.make()

    def happen(self):
        spot = self.world.interruptible()
        if spot and self.chance.random() < 0.06:
            self.world.interrupt(self.chance.choice(spot))
        before = len(self.runs)
        super().happen()
        if len(self.runs) > before and self.chance.random() < 0.6:
            run = [*self.runs.values()][-1]
            change_entry(run, deadline_at=self.world.wall + self.chance.uniform(30, 900))

    def calm_down(self):
        super().calm_down()
        self.world.leaving.clear()

    def judge_end(self):
        super().judge_end()
        for run in self.runs.values():
            assert self.state(run) is RunState.FINISHED
            # A service that is killed while it starts a run anew may count that as a fault, once.
            allocation = register_module.read_allocation(run)
            assert allocation.failures < MOST_FAILURES, "blamed for what was taken away"
        for _ in range(CALM):
            self.turn()
            if not any(reserve.awake for reserve in self.world.reserves()):
                return
        raise AssertionError("a machine is kept for nobody")


def spoil_files(world, monkeypatch, seed):
    """The service is killed around each note, the disk is full now and then, and queues are locked."""
    real_write, real_read = register_module.write_allocation, register_module.read_entry
    chance = random.Random(seed + 1)

    def write(*arguments, **options):
        world.point()  # killed before it was written, or
        if world.kills and chance.random() < 0.03:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_write(*arguments, **options)
        world.point()  # after

    def read(run):
        if world.kills and chance.random() < 0.02:
            raise StoreError("it is locked")
        return real_read(run)

    monkeypatch.setattr(register_module, "write_allocation", write)
    monkeypatch.setattr(register_module, "read_entry", read)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_loses_a_run_or_runs_it_twice_or_leaks_a_device(
    make_world, make_scheduler, monkeypatch, seed
):
    world = make_world({"one": 2, "two": 3}, seed=seed, crashes=0.02, kills=0.02, dawdles=0.5)
    spoil_files(world, monkeypatch, seed)
    progress = Course(world, make_scheduler, seed)
    print(f"seed {seed}")  # noqa: T201 (how to drive the same course again)
    progress.go()
    assert progress.services > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_no_interruption_of_spot_loses_a_run_or_blames_it_or_keeps_a_machine(
    own_home, make_scheduler, monkeypatch, seed
):
    monkeypatch.setattr(SpeedEstimates, "is_known", lambda self, scheduled: True)
    own_home.mkdir(exist_ok=True)
    world = MarketWorld(
        own_home,
        {"own": 2, "cloud": 2, "spot-1": 2, "spot-2": 2},
        chance=random.Random(seed),
        kills=0.02,
        dawdles=0.5,
        spot={"spot-1", "spot-2"},
        cloud={"cloud", "spot-1", "spot-2"},
    )
    spoil_files(world, monkeypatch, seed)
    progress = MarketCourse(world, make_scheduler, seed)
    print(f"seed {seed}")  # noqa: T201 (how to drive the same course again)
    progress.go()
    assert progress.services > 1
