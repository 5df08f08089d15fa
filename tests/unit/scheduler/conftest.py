import random

import pytest

from tests.unit.scheduler.world import Even, Fair, World
from yunlu.scheduler.loop import Scheduler, SteadyClock
from yunlu.scheduler.pool_store import PoolSettings, PoolStore


@pytest.fixture
def make_world(own_home):
    def make(machines=None, *, seed=0, **options):
        own_home.mkdir(exist_ok=True)
        return World(own_home, machines or {"here": 4}, chance=random.Random(seed), **options)

    return make


@pytest.fixture
def make_scheduler():
    count = 0

    def make(world, policy=None, make_estimator=None, scaler=None, **settings):
        nonlocal count
        count += 1
        pool_store = PoolStore(world.home)
        pool_store.path.mkdir(exist_ok=True)
        return Scheduler(
            world.home,
            world,
            policy or Fair(),
            make_estimator or (lambda *_: Even()),
            settings=PoolSettings(**settings),
            pool_store=pool_store,
            clock=SteadyClock(lambda: world.wall, lambda: world.steady),
            scaler=scaler,
            name=f"service-{count}",
        )

    return make
