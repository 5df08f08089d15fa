"""A world with machines that come when they are asked for, and spot ones that are taken away."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tests.unit.scheduler.world import World
from yunlu.core.errors import StoreError
from yunlu.executors.executor import Reserve, name_kind
from yunlu.hardware.fleet import Node, Placement
from yunlu.runs.run_store import RunStore
from yunlu.scheduler.run_status import RunObservation

TYPE = "cpu"
_TOLD_S = 20.0


@dataclass
class MarketWorld(World):
    """Also an executor whose machines come and go (``Scaling``)."""

    cloud: set[str] = field(default_factory=set)
    """Machines that sleep until they are asked for; the others are always there."""
    booting: dict[str, int] = field(default_factory=dict)
    """Seconds until each is there."""
    leaving: dict[str, int] = field(default_factory=dict)
    """Seconds until each is taken away: it was told."""
    asleep: set[str] = field(init=False)
    lost: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By run: the machine that was taken from under it, and when; its cluster tells that for a while."""
    taken: int = 0
    """How often a machine with a run on it was taken away."""

    def __post_init__(self) -> None:
        self.asleep = set(self.cloud)

    def nodes(self) -> tuple[Node, ...]:
        absent = self.asleep | {*self.booting}
        return tuple(
            replace(node, is_leaving=node.name in self.leaving)
            for node in super().nodes()
            if node.name not in absent
        )

    def observe(self, run: RunStore) -> RunObservation:
        observation = super().observe(run)
        name, at = self.lost.get(run.id, ("", -math.inf))
        is_told = not observation.is_alive and self.steady - at < _TOLD_S
        return replace(observation, lost_nodes=(name,)) if is_told else observation

    def start(self, run: RunStore, placement: Placement) -> None:
        there = {node.name for node in self.nodes()}
        if any(name not in there for name, _ in placement.shares):
            raise StoreError("no such machine")
        super().start(run, placement)
        self.lost.pop(run.id, None)

    def break_machine(self, name: str) -> None:
        for process in self.processes:
            if name in process.shares or name in process.wanted:
                self.lost[process.run.id] = (name, self.steady)
        super().break_machine(name)

    def reserves(self) -> tuple[Reserve, ...]:
        found: list[Reserve] = []
        for is_spot in (False, True):
            names = self._names(name_kind(TYPE, is_spot=is_spot))
            there = [name for name in names if name not in self.asleep]
            found.append(
                Reserve(
                    type=TYPE,
                    devices=2,
                    awake=len(there),
                    most=len(names),
                    nodes=tuple(name for name in there if name not in self.booting),
                    is_spot=is_spot,
                )
            )
        return tuple(each for each in found if each.most)

    def scale(self, kind: str, nodes: int) -> None:
        self.point()
        names = self._names(kind)
        awake = [name for name in names if name not in self.asleep]
        for name in [name for name in names if name in self.asleep][: max(nodes - len(awake), 0)]:
            self.asleep.discard(name)
            self.booting[name] = self.chance.randint(1, 9)
        used = self.held()
        idle = [name for name in awake if not used[name]]
        for name in idle[: max(len(awake) - nodes, 0)]:
            self._leave(name)
        self.point()

    def interrupt(self, name: str) -> None:
        """Spot is taken away, with a notice or without."""
        if self.chance.random() < 0.5:
            self.leaving.setdefault(name, self.chance.randint(1, 5))
        else:
            self._take_away(name)

    def interruptible(self) -> list[str]:
        return [node.name for node in self.nodes() if node.is_spot]

    def tick(self, seconds: float = 1.0) -> None:
        super().tick(seconds)
        for waits in (self.booting, self.leaving):
            for name in waits:
                waits[name] -= 1
        for name in [name for name, left in self.booting.items() if left <= 0]:
            del self.booting[name]
        for name in [name for name, left in self.leaving.items() if left <= 0]:
            self._take_away(name)

    def check(self) -> None:
        super().check()
        gone = self.asleep | {*self.booting} | self.dead
        for name, count in self.held().items():
            if count and name in gone:
                self.violations.append(f"{count} devices are taken on {name}, which is not there")

    def _names(self, kind: str) -> list[str]:
        return [
            name
            for name in sorted(self.cloud - self.dead)
            if name_kind(TYPE, is_spot=name in self.spot) == kind
        ]

    def _take_away(self, name: str) -> None:
        self.taken += bool(self.held()[name])
        self.break_machine(name)
        self._leave(name)

    def _leave(self, name: str) -> None:
        self.leaving.pop(name, None)
        self.booting.pop(name, None)
        if name in self.cloud:
            self.asleep.add(name)
