"""The loop of the pool: watch the runs, decide who holds what, apply it, take back what is unused.

``step`` is one turn. Everything it knows it has read from the run directories, so a service that is
killed at any point leaves nothing behind that the next one could not find.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import YunluError
from yunlu.executors.executor import name_kind
from yunlu.executors.registry import LOCAL, scheme_of
from yunlu.scheduler import spot_policy
from yunlu.scheduler.actions import ActionRunner
from yunlu.scheduler.clock import SteadyClock
from yunlu.scheduler.forecast import forecast, with_start
from yunlu.scheduler.moves import hold_still, is_under_way, plan_moves
from yunlu.scheduler.policy.staying import stay_near
from yunlu.scheduler.policy.values import Decision, PoolState, Reason
from yunlu.scheduler.run_registry import RunRegistry
from yunlu.scheduler.run_status import Phase, ScheduledRun, find_held, make_demand, make_teams
from yunlu.scheduler.speed_estimates import SpeedEstimates
from yunlu.scheduler.usage_monitor import UsageMonitor
from yunlu.scheduler.view import make_view

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.executors.executor import Reserve
    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.executor_adapter import RunControl
    from yunlu.scheduler.forecast import QueueForecast
    from yunlu.scheduler.pending_nodes import PendingNode
    from yunlu.scheduler.policy.values import Policy
    from yunlu.scheduler.pool_store import PoolSettings, PoolStore
    from yunlu.scheduler.scaling import Scaler
    from yunlu.scheduler.speed_estimates import MakeEstimator
    from yunlu.scheduler.spot.values import Mode

_KEEP_S = 30.0
_HALF_LIFE_S = 24 * 3600.0
_UNDER_WAY_S = 60.0
"""How long a decision may take to be carried out before it is thought over."""
_UNSEEN = 4.0
"""How much longer a run may be silent of which only its words are seen."""


class Scheduler:
    """One pool."""

    def __init__(
        self,
        home: Path,
        hands: RunControl,
        policy: Policy,
        make_estimator: MakeEstimator,
        *,
        settings: PoolSettings,
        journal: PoolStore,
        clock: SteadyClock | None = None,
        scaler: Scaler | None = None,
        limits: str = "",
        name: str = "",
    ) -> None:
        self._scaler, self._limits = scaler, limits
        self.settings, self.journal = settings, journal
        self.clock = clock or SteadyClock()
        self.hands, self.policy = hands, policy
        self.register = RunRegistry(home, hands, self.clock, name=name)
        self.deeds = ActionRunner(self.register, hands, self.clock, name=name)
        self.knowledge = SpeedEstimates(make_estimator)
        self.nodes: tuple[Node, ...] = ()
        self.decision: Decision | None = None
        """The standing one; None while nothing may be changed."""
        self.forecast: dict[str, QueueForecast] = {}
        self.decided_ms = 0.0
        self._signature: Any = None
        self._news: Any = None
        """What is not our own doing: runs that come and go, what is asked of them, machines."""
        self._fixed: frozenset[str] = frozenset()
        """Runs that could not be moved when it was decided last."""
        self._decided_at = -math.inf
        self._told: dict[str, tuple[str, Any]] = {}
        self._queued_since: dict[str, float] = {}
        """Since when a run waits in the queue of its cluster, on the monotonic clock."""
        self._markets = spot_policy.SpotPolicy(
            step_s=settings.round_s + _UNDER_WAY_S, prices=settings.prices
        )
        self._teams = journal.read_teams()
        self._kept_at = self._charged_at = self.clock.now()
        self._gauge = UsageMonitor(is_local=scheme_of(settings.executor) == LOCAL)
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
        lost = {name for s in self.register.stands.values() for name in s.sight.lost_nodes}
        if lost:  # its cluster will notice, too; until then nothing is put there
            self.nodes = tuple(
                replace(node, is_leaving=True) if node.name in lost else node for node in self.nodes
            )
        for stand in self.register.stands.values():
            self.knowledge.learn(stand)
        self._charge()
        self._measure()

    def _priced(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        prices, usual = self.settings.prices, self.settings.dollars_per_hour or 0.0
        return tuple(
            n
            if n.dollars_per_hour
            else replace(
                n, dollars_per_hour=prices.get(name_kind(n.type, is_spot=n.is_spot), usual)
            )
            for n in nodes
        )

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
        alive = {s.id: s for s in self.register.stands.values() if s.sight.is_alive}
        for run_id, words in self._gauge.look(alive, self.nodes).items():
            self._tell(run_id, "lies", words)
            with suppress(OSError):
                alive[run_id].run.warn(f"the pool: {words}")

    # Decide.

    def _decide(self) -> None:
        stands = self.register.ordered()
        signature = tuple((s.id, s.phase, s.notes.shares, s.entry) for s in stands)
        news = tuple((s.id, s.entry, s.rests) for s in stands), self.nodes
        is_due = self.clock.now() - self._decided_at >= self.settings.round_s
        if not self.nodes:  # none known: nobody is sent away for that
            self.decision = None
            if is_due:
                self._decided_at = self.clock.now()
                state = self._describe(stands)
                self._scale(state, self._choose_markets(state, stands))
                self._foresee(state, Decision(placements={}), stands)
            return
        if not is_due and (signature, self.nodes) == self._signature:
            return
        if news == self._news and self._is_under_way(stands):
            return
        began = time.process_time()
        try:
            state = self._describe(stands)
            modes = self._choose_markets(state, stands)
            seen = spot_policy.steer(state, modes)
            decided = self.policy.decide(seen)
            placements = stay_near(decided.placements, seen.jobs, seen.nodes)
            self.decision = spot_policy.explain(modes, replace(decided, placements=placements))
            self.decided_ms = (time.process_time() - began) * 1e3
            self._scale(state, modes)
            self._foresee(seen, self.decision, stands)
            self._troubles.pop("policy", None)
        except Exception as error:  # noqa: BLE001 (policies and estimators are doors: their faults must not end runs)
            self._trouble("policy", f"the policy failed, and nothing was changed: {error!r}")
            self.decision = self._signature = None
            return
        self._signature, self._decided_at = (signature, self.nodes), self.clock.now()
        self._news, self._fixed = news, frozenset(s.id for s in stands if not s.may_move)
        self._explain(stands, self.decision)

    def _is_under_way(self, stands: list[ScheduledRun]) -> bool:
        """Whether what was decided last is still being done."""
        if self.decision is None or self.clock.now() - self._decided_at > _UNDER_WAY_S:
            return False
        return is_under_way(stands, hold_still(stands, self.decision.placements, self._fixed))

    def _find_unknown(self, stands: list[ScheduledRun]) -> set[str]:
        return {s.id for s in stands if not self.knowledge.is_known(s)}

    def _choose_markets(self, state: PoolState, stands: list[ScheduledRun]) -> dict[str, Mode]:
        """Whether each run with a deadline may be on spot now, where there is also on-demand."""
        if all(job.deadline_at is None for job in state.jobs):
            return {}
        reserves: tuple[Reserve, ...] = ()
        with suppress(YunluError, OSError):  # whoever asks for machines tells of it
            reserves = self._scaler.reserves() if self._scaler is not None else ()
        return self._markets.choose(
            state,
            reserves,
            spent_dollars={s.id: s.notes.spent_dollars for s in stands},
            unknown=self._find_unknown(stands),
        )

    def _scale(self, state: PoolState, modes: dict[str, Mode]) -> None:
        if self._scaler is None:
            return
        claims: dict[str, int] = {}
        for stand in self.register.stands.values():
            for name, count in stand.notes.claims.items():
                claims[name] = claims.get(name, 0) + count
        try:
            for kind, words in self._scaler.follow(state, claims, modes=modes).items():
                self._tell("", "machines", f"{kind}: {words}")
            self._troubles.pop("machines", None)
        except (YunluError, OSError) as error:
            self._trouble("machines", f"the cluster cannot be asked for machines: {error}")

    def _foresee(self, state: PoolState, decision: Decision, stands: list[ScheduledRun]) -> None:
        unknown = self._find_unknown(stands)
        self.forecast = forecast(state, decision, unknown, self._arrivals)

    @property
    def _arrivals(self) -> tuple[PendingNode, ...]:
        return self._scaler.arrivals if self._scaler is not None else ()

    def _describe(self, stands: list[ScheduledRun]) -> PoolState:
        there = {node.name for node in self.nodes if not node.is_leaving}
        types = tuple(sorted({node.type for node in self.nodes}))
        wanting = [s for s in stands if find_held(s, there) or (s.may_move and not s.rests)]
        demands = [
            make_demand(s, self.knowledge.tell(s, types), self.clock, there) for s in wanting
        ]
        return PoolState(
            now=self.clock.now(),
            nodes=self.nodes,
            jobs=tuple(sorted(demands, key=lambda demand: demand.submitted_at)),
            teams=make_teams(self.settings, {s.entry.team for s in wanting}, self._teams),
        )

    def _explain(self, stands: list[ScheduledRun], decision: Decision) -> None:
        for stand in stands:
            if stand.phase is Phase.BACKING_OFF:
                words = f"It failed: {stand.notes.failure.rstrip('.')}"
                self._tell(stand.id, "failed", f"{words}. It waits {stand.notes.wait_s():.0f} s.")
            if stand.rests:
                continue
            wanted = decision.placements.get(stand.id)
            told = decision.reasons.get(stand.id) if stand.may_move else None
            reason = told or _plain_reason(stand, wanted)
            shares = list(wanted.shares) if wanted else []
            self._tell(
                stand.id,
                reason.code,
                reason.text,
                shares=[list(share) for share in shares],
                was=[list(share) for share in stand.notes.shares],
                figures=with_start(reason.figures, self.forecast.get(stand.id)),
            )

    # Apply.

    def _apply(self) -> None:
        for stand in self.register.ordered():
            if stand.phase is Phase.LEAVING:
                self.deeds.hurry(stand)
        if self.decision is None:
            return
        stands = self.register.ordered()
        wanted = hold_still(stands, self.decision.placements, self._fixed)
        for move in plan_moves(stands, wanted, self.nodes):
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
            elif (vain := self._find_vain_wait(stand, now)) and not stand.is_sent_away:
                self.deeds.call_off(stand, vain)
                self._tell(stand.id, "called off", f"{vain}: {stand.sight.waits_for}")
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
            self._queued_since.pop(run_id, None)

    def _is_stalled(self, stand: ScheduledRun, now: float) -> bool:
        patience_s = max(self.settings.stall_s, 50 * stand.course.usual_step_s)
        silent_s = now - stand.course.moved_at
        if silent_s < patience_s:
            return False
        usage = self._gauge.usage.get(stand.id)
        if stand.sight.shares and (usage is None or usage.cores is None):
            return silent_s > _UNSEEN * patience_s  # whether it computes is not known here
        return usage is not None and usage.cores is not None and usage.cores < 0.05

    def _find_vain_wait(self, stand: ScheduledRun, now: float) -> str | None:
        """Why a run need not wait any longer in the queue of its cluster; None where it may."""
        if not stand.sight.waits_for:
            self._queued_since.pop(stand.id, None)
            return None
        since = self._queued_since.setdefault(stand.id, now)
        names = [name for name, _ in stand.notes.shares]
        if self.nodes and (gone := {*names} - {node.name for node in self.nodes}):
            return f"{', '.join(sorted(gone))} is not there any more"
        if not stand.sight.state.is_active:
            return "its cluster took its devices away, and would let it wait for the same ones"
        if now - since > self.settings.queue_s:
            return f"its cluster has not started it on {', '.join(names)} for {now - since:.0f} s"
        return None

    # Tell.

    def _publish(self) -> None:
        self.journal.publish(
            make_view(
                self.register.ordered(),
                self.nodes,
                self.decision or Decision(placements={}),
                self.forecast,
                arrivals=self._arrivals,
                now=self.clock.now(),
                gauge=self._gauge,
                settings=self.settings,
                limits=self._limits,
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


def _plain_reason(stand: ScheduledRun, wanted: Any) -> Reason:
    if not stand.may_move:
        return Reason(code="kept", text=f"it is {stand.phase}: what it holds stays as it is")
    if not wanted:
        return Reason(code="waits", text="others make more of the devices")
    return Reason(code="given", text=f"it gets {wanted.devices} devices")
