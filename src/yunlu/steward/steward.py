"""The loop of the pool: watch the runs, decide who holds what, apply it, take back what is unused.

``step`` is one turn. Everything it knows it has read from the run directories, so a service that is
killed at any point leaves nothing behind that the next one could not find.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import YunluError
from yunlu.pool.allocation.values import Decision, PoolState, Reason, Team
from yunlu.steward.clock import SteadyClock
from yunlu.steward.deeds import Deeds
from yunlu.steward.forecast import forecast
from yunlu.steward.monitor import Machine
from yunlu.steward.moves import plan_moves
from yunlu.steward.register import Register
from yunlu.steward.speed import Knowledge
from yunlu.steward.stand import Phase, Stand, make_demand
from yunlu.steward.view import make_view

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.pool.allocation.observations import Estimator
    from yunlu.pool.allocation.values import Node, Policy
    from yunlu.steward.forecast import Forecast
    from yunlu.steward.hands import Hands
    from yunlu.steward.journal import Journal, PoolSettings
    from yunlu.steward.monitor import Usage
    from yunlu.steward.scaling import Scaler

_USAGE_S = 5.0
_KEEP_S = 30.0
_HALF_LIFE_S = 24 * 3600.0
_LIES = 3
"""Looks in a row at which a run takes more than it holds."""


@dataclass(slots=True)
class _Figures:
    """What was measured of the machine, now and then."""

    machine: dict[str, float] = field(default_factory=dict[str, float])
    usage: dict[str, Usage] = field(default_factory=dict[str, Any])
    looked_at: float = -math.inf
    lies: dict[str, int] = field(default_factory=dict[str, int])


class Steward:
    """One pool."""

    def __init__(
        self,
        home: Path,
        hands: Hands,
        policy: Policy,
        make_estimator: Callable[[int], Estimator],
        *,
        settings: PoolSettings,
        journal: Journal,
        clock: SteadyClock | None = None,
        scaler: Scaler | None = None,
        name: str = "",
    ) -> None:
        self._scaler = scaler
        self.settings, self.journal = settings, journal
        self.clock = clock or SteadyClock()
        self.hands, self.policy = hands, policy
        self.register = Register(home, hands, self.clock, name=name)
        self.deeds = Deeds(self.register, hands, self.clock, name=name)
        self.knowledge = Knowledge(make_estimator)
        self.nodes: tuple[Node, ...] = ()
        self.decision: Decision | None = None
        """The standing one; None while nothing may be changed."""
        self.forecast: dict[str, Forecast] = {}
        self.decided_ms = 0.0
        self._signature: Any = None
        self._decided_at = -math.inf
        self._told: dict[str, tuple[str, Any]] = {}
        self._teams = journal.read_teams()
        self._kept_at = self._charged_at = self.clock.now()
        self._figures = _Figures()
        self._machine = Machine()
        self._troubles: dict[str, str] = {}

    def step(self) -> None:
        """One turn of the loop. A fault of one run, or of a file, is that run's and that file's."""
        self._watch()
        self._decide()
        self._apply()
        self._reclaim()
        self._publish()

    # Watch.

    def _watch(self) -> None:
        jump_s = self.clock.find_jump_s()
        if jump_s is not None:
            self._tell("", "clock", f"the clock of this machine was set by {jump_s:+.0f} s")
        try:
            self.nodes = self._priced(self.hands.nodes())
            self._troubles.pop("nodes", None)
        except (YunluError, OSError) as error:
            # A cluster that does not answer has not lost its machines.
            self._trouble("nodes", f"the machines cannot be listed: {error}")
        types = {node.name: node.type for node in self.nodes}
        self.register.refresh(types)
        for stand in self.register.stands.values():
            self.knowledge.learn(stand)
        self._charge()
        self._measure()

    def _priced(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        price = self.settings.dollars_per_hour
        if price is None:
            return nodes
        return tuple(n if n.dollars_per_hour else replace(n, dollars_per_hour=price) for n in nodes)

    def _charge(self) -> None:
        """What was held since the last look is used, and costs."""
        now = self.clock.now()
        span_s, self._charged_at = max(0.0, now - self._charged_at), now
        prices = {n.name: n.dollars_per_hour / 3600 / max(n.devices, 1) for n in self.nodes}
        fade = 0.5 ** (span_s / _HALF_LIFE_S)
        self._teams = {team: used * fade for team, used in self._teams.items() if used > 1}
        for stand in self.register.stands.values():
            held = stand.notes.placement
            if not held:
                continue
            dollars = sum(count * prices.get(name, 0.0) for name, count in held.shares) * span_s
            self.register.charge(stand, device_s=held.devices * span_s, dollars=dollars)
            team = stand.entry.team
            self._teams[team] = self._teams.get(team, 0.0) + held.devices * span_s
        if now - self._kept_at > _KEEP_S:
            self._kept_at = now
            self.register.keep_all()
            self.journal.write_teams(self._teams)

    def _measure(self) -> None:
        """Who takes how much of the machine, and who takes more than it holds."""
        figures = self._figures
        if time.monotonic() - figures.looked_at < _USAGE_S:
            return
        figures.looked_at = time.monotonic()
        alive = {s.id: s for s in self.register.stands.values() if s.sight.is_alive}
        figures.machine = self._machine.look()
        figures.usage = self._machine.usage({i: s.run_dir for i, s in alive.items()})
        for run_id, stand in alive.items():
            words = find_lie(stand, figures.usage[run_id], figures.machine, self.nodes)
            count = figures.lies.get(run_id, 0) + 1 if words else 0
            figures.lies[run_id] = count
            if words and count == _LIES:
                self._tell(run_id, "lies", words)
                with suppress(OSError):
                    stand.run_dir.warn(f"the pool: {words}")

    # Decide.

    def _decide(self) -> None:
        stands = self.register.ordered()
        signature = tuple((s.id, s.phase, s.notes.shares, s.entry) for s in stands)
        is_due = self.clock.now() - self._decided_at >= self.settings.round_s
        if not self.nodes:  # none known: nobody is sent away for that
            self.decision = None
            if is_due:
                self._decided_at = self.clock.now()
                self._scale(self._describe(stands))
            return
        if not is_due and (signature, self.nodes) == self._signature:
            return
        began = time.process_time()
        try:
            state = self._describe(stands)
            self.decision = self.policy.decide(state)
            unknown = {s.id for s in stands if not self.knowledge.is_known(s)}
            self.forecast = forecast(state, self.decision, unknown)
            self._troubles.pop("policy", None)
        except Exception as error:  # noqa: BLE001 (policies and estimators are doors: their faults must not end runs)
            self._trouble("policy", f"the policy failed, and nothing was changed: {error!r}")
            self.decision = self._signature = None
            return
        self._signature, self._decided_at = (signature, self.nodes), self.clock.now()
        self.decided_ms = (time.process_time() - began) * 1e3
        self._explain(stands, self.decision)
        self._scale(state)

    def _scale(self, state: PoolState) -> None:
        if self._scaler is None:
            return
        claims: dict[str, int] = {}
        for stand in self.register.stands.values():
            for name, count in stand.notes.claims.items():
                claims[name] = claims.get(name, 0) + count
        try:
            for kind, words in self._scaler.follow(state, claims).items():
                self._tell("", "machines", f"{kind}: {words}")
        except (YunluError, OSError) as error:
            self._trouble("machines", f"the cluster cannot be asked for machines: {error}")

    def _describe(self, stands: list[Stand]) -> PoolState:
        wanting = [s for s in stands if s.notes.claims or not (s.phase.is_over or _waits(s))]
        names = {s.entry.team for s in wanting} | {*self.settings.quotas}
        teams = tuple(
            Team(
                name=name,
                quota=self.settings.quotas.get(name),
                used_device_s=self._teams.get(name, 0.0),
            )
            for name in sorted(names)
            if names != {""}  # where nobody has a team, nobody is to be fair between them
        )
        demands = [make_demand(s, self.knowledge.tell(s), self.clock) for s in wanting]
        return PoolState(
            now=self.clock.now(),
            nodes=self.nodes,
            jobs=tuple(sorted(demands, key=lambda demand: demand.submitted_at)),
            teams=teams,
        )

    def _explain(self, stands: list[Stand], decision: Decision) -> None:
        for stand in stands:
            if stand.phase.is_over or _waits(stand):
                continue
            wanted = decision.placements.get(stand.id)
            reason = decision.reasons.get(stand.id) or _plain_reason(stand, wanted)
            shares = list(wanted.shares) if wanted else []
            self._tell(
                stand.id,
                reason.code,
                reason.text,
                shares=[list(share) for share in shares],
                was=[list(share) for share in stand.notes.shares],
                figures=dict(reason.figures),
            )

    # Apply.

    def _apply(self) -> None:
        for stand in self.register.ordered():
            if stand.phase is Phase.LEAVING:
                self.deeds.hurry(stand)
        if self.decision is None:
            return
        for move in plan_moves(self.register.ordered(), self.decision.placements, self.nodes):
            stand = self.register.stands[move.run_id]
            if words := self.deeds.do(stand, move):
                self._tell(move.run_id, "put off", words)

    # Reclaim.

    def _reclaim(self) -> None:
        now = time.monotonic()
        for stand in self.register.ordered():
            budget = stand.entry.budget_dollars
            if stand.notes.given_up:
                if words := self.deeds.give_up(stand):
                    self._tell(stand.id, "given up", words)
            elif stand.phase not in {Phase.RUNNING, Phase.CHANGING}:
                continue
            elif budget is not None and stand.notes.spent_dollars >= budget:
                words = f"its budget of ${budget:g} is spent"
                self.deeds.dismiss(stand, words)
                self._tell(stand.id, "over budget", words)
            elif self._is_stalled(stand, now):
                idle_s = now - stand.course.moved_at
                words = f"it has written nothing and computed nothing for {idle_s:.0f} s"
                self.deeds.end_stalled(stand)
                self._tell(stand.id, "stalled", words)
        for run_id in self.register.drop_over():
            self.knowledge.forget(run_id)
            self._told.pop(run_id, None)

    def _is_stalled(self, stand: Stand, now: float) -> bool:
        patience_s = max(self.settings.stall_s, 50 * stand.course.usual_step_s)
        if now - stand.course.moved_at < patience_s:
            return False
        usage = self._figures.usage.get(stand.id)
        return usage is not None and usage.cores is not None and usage.cores < 0.05

    # Tell.

    def _publish(self) -> None:
        self.journal.publish(
            make_view(
                self.register.ordered(),
                self.nodes,
                self.decision or Decision(placements={}),
                self.forecast,
                now=self.clock.now(),
                machine=self._figures.machine,
                usage=self._figures.usage,
                settings=self.settings,
                decided_ms=self.decided_ms,
                troubles={**self._troubles, **self.register.troubles},
            )
        )

    def _tell(self, run_id: str, code: str, text: str, **more: Any) -> None:
        """A line of the decisions, unless it was the last one about this run."""
        gist = (code, more.get("shares"))
        if run_id and self._told.get(run_id) == gist:
            return
        self._told[run_id] = gist
        line = {"at": round(self.clock.now(), 3), "run": run_id, "code": code, "text": text, **more}
        self.journal.tell([line])

    def _trouble(self, what: str, words: str) -> None:
        if self._troubles.get(what) != words:
            self._troubles[what] = words
            self._tell("", "trouble", words)


def find_lie(
    stand: Stand, usage: Usage, machine: dict[str, float], nodes: tuple[Node, ...]
) -> str | None:
    """What a run takes beyond what it holds, in words; None where it keeps to it."""
    held, node = stand.notes.placement.devices, next(iter(nodes), None)
    if node is None or not held or not machine:
        return None
    if node.type == "cpu" and usage.cores is not None and usage.cores > 1.3 * held + 0.3:
        return f"it keeps {usage.cores:.1f} cores busy, and holds {held} of {node.devices} shares"
    share_bytes = machine["memory_bytes"] * held / max(node.devices, 1)
    if usage.memory_bytes > 1.1 * share_bytes:
        took, part = usage.memory_bytes / 2**30, share_bytes / 2**30
        return f"it takes {took:.1f} GiB of memory, and its share is {part:.1f} GiB"
    return None


def _waits(stand: Stand) -> bool:
    """Not to be given anything now."""
    return stand.phase in {Phase.BACKING_OFF, Phase.TROUBLED}


def _plain_reason(stand: Stand, wanted: Any) -> Reason:
    if not stand.may_move:
        return Reason(code="kept", text=f"it is {stand.phase}: what it holds stays as it is")
    if not wanted:
        return Reason(code="waits", text="others make more of the devices")
    return Reason(code="given", text=f"it gets {wanted.devices} devices")
