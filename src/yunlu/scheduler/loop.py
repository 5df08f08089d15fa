"""Scheduler loop: observe the runs, decide placements, apply them, reclaim unused devices.

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
from yunlu.scheduler.actions import ActionRunner, hold_still, is_under_way, plan_moves
from yunlu.scheduler.forecast import forecast, with_start
from yunlu.scheduler.policy.placement import minimise_moves
from yunlu.scheduler.policy.values import Decision, PoolState, Reason
from yunlu.scheduler.pool_view import make_view
from yunlu.scheduler.run_progress import SpeedEstimates
from yunlu.scheduler.run_registry import RunRegistry
from yunlu.scheduler.run_status import Phase, ScheduledRun, find_held, make_demand, make_teams
from yunlu.scheduler.usage_monitor import UsageMonitor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.executors.executor import Reserve
    from yunlu.hardware.fleet import Node
    from yunlu.scheduler.executor_adapter import RunControl
    from yunlu.scheduler.forecast import QueueForecast
    from yunlu.scheduler.policy.values import Policy
    from yunlu.scheduler.pool_store import PoolSettings, PoolStore
    from yunlu.scheduler.run_progress import MakeEstimator
    from yunlu.scheduler.scaling import PendingNode, Scaler
    from yunlu.scheduler.spot import Mode

_JUMP_S = 5.0


class SteadyClock:
    """Seconds since the epoch at the start plus monotonic time since; setting the system clock has no effect."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._began_at, self._since = wall(), steady()
        self._told_s = 0.0

    def now(self) -> float:
        """Current time; all decisions use it."""
        return self._began_at + (self._steady() - self._since)

    def from_wall(self, at: float) -> float:
        """Convert a wall-clock time to this clock."""
        return at - self._wall() + self.now()

    def find_jump_s(self) -> float | None:
        """By how much the wall clock was set since the last call; None if it was not."""
        off_s = self._wall() - self.now()
        jump_s, self._told_s = off_s - self._told_s, off_s
        return jump_s if abs(jump_s) > _JUMP_S else None


_KEEP_S = 30.0
_HALF_LIFE_S = 24 * 3600.0
_UNDER_WAY_S = 60.0
"""Longest time for a decision to be executed before it is made anew."""
_UNSEEN = 4.0
"""Factor on the stall limit of a run whose processes cannot be observed, only its log."""


class Scheduler:
    """Scheduler of one pool."""

    def __init__(
        self,
        home: Path,
        control: RunControl,
        policy: Policy,
        make_estimator: MakeEstimator,
        *,
        settings: PoolSettings,
        pool_store: PoolStore,
        clock: SteadyClock | None = None,
        scaler: Scaler | None = None,
        limits: str = "",
        name: str = "",
    ) -> None:
        self._scaler, self._limits = scaler, limits
        self.settings, self.pool_store = settings, pool_store
        self.clock = clock or SteadyClock()
        self.control, self.policy = control, policy
        self.registry = RunRegistry(home, control, self.clock, name=name)
        self.actions = ActionRunner(self.registry, control, self.clock, name=name)
        self.speeds = SpeedEstimates(make_estimator)
        self.nodes: tuple[Node, ...] = ()
        self.decision: Decision | None = None
        """The current decision; None while nothing may be changed."""
        self.forecast: dict[str, QueueForecast] = {}
        self.decided_ms = 0.0
        self._signature: Any = None
        self._news: Any = None
        """External changes: runs that come and go, requests of users, nodes."""
        self._fixed: frozenset[str] = frozenset()
        """Runs that could not be moved at the last decision."""
        self._decided_at = -math.inf
        self._told: dict[str, tuple[str, Any]] = {}
        self._queued_since: dict[str, float] = {}
        """Since when a run waits in its cluster's queue, on the monotonic clock."""
        self._spot_policy = spot_policy.LiveSpotPolicy(
            step_s=settings.round_s + _UNDER_WAY_S, prices=settings.prices
        )
        self._teams = pool_store.read_teams()
        self._kept_at = self._charged_at = self.clock.now()
        self._usage_monitor = UsageMonitor(is_local=scheme_of(settings.executor) == LOCAL)
        self._troubles: dict[str, str] = {}

    def step(self) -> None:
        """One turn of the loop. A failure of one run or file affects only that run or file."""
        self._watch()
        self._decide()
        self._apply()
        self._reclaim()
        self._publish()

    # Observe.

    def _watch(self) -> None:
        jump_s = self.clock.find_jump_s()
        if jump_s is not None:
            self._record("", "clock", f"the clock of this machine was set by {jump_s:+.0f} s")
        try:
            self.nodes = self._priced(self.control.nodes())
            self._troubles.pop("nodes", None)
        except (YunluError, OSError) as error:
            # A cluster that does not answer has not lost its nodes.
            self._trouble("nodes", f"the machines cannot be listed: {error}")
        types = {node.name: node.type for node in self.nodes}
        self.registry.refresh(types)
        lost = {
            name for s in self.registry.scheduled_runs.values() for name in s.observation.lost_nodes
        }
        if lost:  # its cluster will notice too; until then nothing is placed there
            self.nodes = tuple(
                replace(node, is_leaving=True) if node.name in lost else node for node in self.nodes
            )
        for scheduled in self.registry.scheduled_runs.values():
            self.speeds.learn(scheduled)
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
        """Account for the devices held since the last observation."""
        now = self.clock.now()
        span_s, self._charged_at = max(0.0, now - self._charged_at), now
        prices = {n.name: n.dollars_per_hour / 3600 / max(n.devices, 1) for n in self.nodes}
        fade = 0.5 ** (span_s / _HALF_LIFE_S)
        self._teams = {team: used * fade for team, used in self._teams.items() if used > 1}
        for scheduled in self.registry.scheduled_runs.values():
            held = scheduled.allocation.placement
            if not held:
                continue
            dollars = sum(count * prices.get(name, 0.0) for name, count in held.shares) * span_s
            self.registry.charge(scheduled, device_s=held.devices * span_s, dollars=dollars)
            team = scheduled.entry.team
            self._teams[team] = self._teams.get(team, 0.0) + held.devices * span_s
        if now - self._kept_at > _KEEP_S:
            self._kept_at = now
            self.registry.keep_all()
            self.pool_store.write_teams(self._teams)

    def _measure(self) -> None:
        alive = {s.id: s for s in self.registry.scheduled_runs.values() if s.observation.is_alive}
        for run_id, text in self._usage_monitor.update(alive, self.nodes).items():
            self._record(run_id, "overuse", text)
            with suppress(OSError):
                alive[run_id].run.warn(f"the pool: {text}")

    # Decide.

    def _decide(self) -> None:
        scheduled_runs = self.registry.ordered()
        signature = tuple((s.id, s.phase, s.allocation.shares, s.entry) for s in scheduled_runs)
        news = tuple((s.id, s.entry, s.rests) for s in scheduled_runs), self.nodes
        is_due = self.clock.now() - self._decided_at >= self.settings.round_s
        if not self.nodes:  # none known: no run is stopped for that
            self.decision = None
            if is_due:
                self._decided_at = self.clock.now()
                state = self._describe(scheduled_runs)
                self._scale(state, self._choose_markets(state, scheduled_runs))
                self._forecast(state, Decision(placements={}), scheduled_runs)
            return
        if not is_due and (signature, self.nodes) == self._signature:
            return
        if news == self._news and self._is_under_way(scheduled_runs):
            return
        began = time.process_time()
        try:
            state = self._describe(scheduled_runs)
            modes = self._choose_markets(state, scheduled_runs)
            seen = spot_policy.steer(state, modes)
            decided = self.policy.decide(seen)
            placements = minimise_moves(decided.placements, seen.jobs, seen.nodes)
            self.decision = spot_policy.explain(modes, replace(decided, placements=placements))
            self.decided_ms = (time.process_time() - began) * 1e3
            self._scale(state, modes)
            self._forecast(seen, self.decision, scheduled_runs)
            self._troubles.pop("policy", None)
        except Exception as error:  # noqa: BLE001 (policies and estimators are doors: their faults must not end runs)
            self._trouble("policy", f"the policy failed, and nothing was changed: {error!r}")
            self.decision = self._signature = None
            return
        self._signature, self._decided_at = (signature, self.nodes), self.clock.now()
        self._news, self._fixed = news, frozenset(s.id for s in scheduled_runs if not s.may_move)
        self._explain(scheduled_runs, self.decision)

    def _is_under_way(self, scheduled_runs: list[ScheduledRun]) -> bool:
        """Whether the last decision is still being executed."""
        if self.decision is None or self.clock.now() - self._decided_at > _UNDER_WAY_S:
            return False
        return is_under_way(
            scheduled_runs, hold_still(scheduled_runs, self.decision.placements, self._fixed)
        )

    def _find_unknown(self, scheduled_runs: list[ScheduledRun]) -> set[str]:
        return {s.id for s in scheduled_runs if not self.speeds.is_known(s)}

    def _choose_markets(
        self, state: PoolState, scheduled_runs: list[ScheduledRun]
    ) -> dict[str, Mode]:
        """Whether each run with a deadline may use spot now, if the pool has on-demand too."""
        if all(job.deadline_at is None for job in state.jobs):
            return {}
        reserves: tuple[Reserve, ...] = ()
        with suppress(YunluError, OSError):  # reported by the autoscaler
            reserves = self._scaler.reserves() if self._scaler is not None else ()
        return self._spot_policy.choose(
            state,
            reserves,
            spent_dollars={s.id: s.allocation.spent_dollars for s in scheduled_runs},
            unknown=self._find_unknown(scheduled_runs),
        )

    def _scale(self, state: PoolState, modes: dict[str, Mode]) -> None:
        if self._scaler is None:
            return
        claims: dict[str, int] = {}
        for scheduled in self.registry.scheduled_runs.values():
            for name, count in scheduled.allocation.claims.items():
                claims[name] = claims.get(name, 0) + count
        try:
            for kind, text in self._scaler.follow(state, claims, modes=modes).items():
                self._record("", "machines", f"{kind}: {text}")
            self._troubles.pop("machines", None)
        except (YunluError, OSError) as error:
            self._trouble("machines", f"the cluster cannot be asked for machines: {error}")

    def _forecast(
        self, state: PoolState, decision: Decision, scheduled_runs: list[ScheduledRun]
    ) -> None:
        unknown = self._find_unknown(scheduled_runs)
        self.forecast = forecast(state, decision, unknown, self._pending_nodes)

    @property
    def _pending_nodes(self) -> tuple[PendingNode, ...]:
        return self._scaler.pending_nodes if self._scaler is not None else ()

    def _describe(self, scheduled_runs: list[ScheduledRun]) -> PoolState:
        there = {node.name for node in self.nodes if not node.is_leaving}
        types = tuple(sorted({node.type for node in self.nodes}))
        wanting = [s for s in scheduled_runs if find_held(s, there) or (s.may_move and not s.rests)]
        demands = [
            make_demand(s, self.speeds.model_for(s, types), self.clock, there) for s in wanting
        ]
        return PoolState(
            now=self.clock.now(),
            nodes=self.nodes,
            jobs=tuple(sorted(demands, key=lambda demand: demand.submitted_at)),
            teams=make_teams(self.settings, {s.entry.team for s in wanting}, self._teams),
        )

    def _explain(self, scheduled_runs: list[ScheduledRun], decision: Decision) -> None:
        for scheduled in scheduled_runs:
            if scheduled.phase is Phase.BACKING_OFF:
                text = f"It failed: {scheduled.allocation.failure.rstrip('.')}"
                self._record(
                    scheduled.id,
                    "failed",
                    f"{text}. It waits {scheduled.allocation.wait_s():.0f} s.",
                )
            if scheduled.rests:
                continue
            wanted = decision.placements.get(scheduled.id)
            result = decision.reasons.get(scheduled.id) if scheduled.may_move else None
            reason = result or _plain_reason(scheduled, wanted)
            shares = list(wanted.shares) if wanted else []
            self._record(
                scheduled.id,
                reason.code,
                reason.text,
                shares=[list(share) for share in shares],
                was=[list(share) for share in scheduled.allocation.shares],
                figures=with_start(reason.figures, self.forecast.get(scheduled.id)),
            )

    # Apply.

    def _apply(self) -> None:
        for scheduled in self.registry.ordered():
            if scheduled.phase is Phase.LEAVING:
                self.actions.hurry(scheduled)
        if self.decision is None:
            return
        scheduled_runs = self.registry.ordered()
        wanted = hold_still(scheduled_runs, self.decision.placements, self._fixed)
        for move in plan_moves(scheduled_runs, wanted, self.nodes):
            scheduled = self.registry.scheduled_runs[move.run_id]
            if text := self.actions.do(scheduled, move):
                self._record(move.run_id, "postponed", text)

    # Reclaim.

    def _reclaim(self) -> None:
        now = time.monotonic()
        for scheduled in self.registry.ordered():
            budget = scheduled.entry.budget_dollars
            if scheduled.allocation.given_up:
                if text := self.actions.give_up(scheduled):
                    self._record(scheduled.id, "given up", text)
            elif (vain := self._find_vain_wait(scheduled, now)) and not scheduled.is_sent_away:
                self.actions.requeue_elsewhere(scheduled, vain)
                self._record(scheduled.id, "requeued", f"{vain}: {scheduled.observation.waits_for}")
            elif scheduled.phase not in {Phase.RUNNING, Phase.CHANGING}:
                continue
            elif budget is not None and scheduled.allocation.spent_dollars >= budget:
                text = f"its budget of ${budget:g} is spent"
                self.actions.dismiss(scheduled, text)
                self._record(scheduled.id, "over budget", text)
            elif self._is_stalled(scheduled, now):
                idle_s = now - scheduled.progress.moved_at
                text = f"it has written nothing and computed nothing for {idle_s:.0f} s"
                self.actions.end_stalled(scheduled)
                self._record(scheduled.id, "stalled", text)
        for run_id in self.registry.drop_over():
            self.speeds.forget(run_id)
            self._told.pop(run_id, None)
            self._queued_since.pop(run_id, None)

    def _is_stalled(self, scheduled: ScheduledRun, now: float) -> bool:
        patience_s = max(self.settings.stall_s, 50 * scheduled.progress.usual_step_s)
        silent_s = now - scheduled.progress.moved_at
        if silent_s < patience_s:
            return False
        usage = self._usage_monitor.usage.get(scheduled.id)
        if scheduled.observation.shares and (usage is None or usage.cores is None):
            return silent_s > _UNSEEN * patience_s  # whether it computes cannot be observed here
        return usage is not None and usage.cores is not None and usage.cores < 0.05

    def _find_vain_wait(self, scheduled: ScheduledRun, now: float) -> str | None:
        """Why a run should not wait any longer in its cluster's queue; None if it may."""
        if not scheduled.observation.waits_for:
            self._queued_since.pop(scheduled.id, None)
            return None
        since = self._queued_since.setdefault(scheduled.id, now)
        names = [name for name, _ in scheduled.allocation.shares]
        if self.nodes and (gone := {*names} - {node.name for node in self.nodes}):
            return f"{', '.join(sorted(gone))} is not there any more"
        if not scheduled.observation.state.is_active:
            return "its cluster took its devices away, and would let it wait for the same ones"
        if now - since > self.settings.queue_s:
            return f"its cluster has not started it on {', '.join(names)} for {now - since:.0f} s"
        return None

    # Publish.

    def _publish(self) -> None:
        self.pool_store.publish(
            make_view(
                self.registry.ordered(),
                self.nodes,
                self.decision or Decision(placements={}),
                self.forecast,
                pending_nodes=self._pending_nodes,
                now=self.clock.now(),
                usage_monitor=self._usage_monitor,
                settings=self.settings,
                limits=self._limits,
                decided_ms=self.decided_ms,
                troubles={**self._troubles, **self.registry.troubles},
            )
        )

    def _record(self, run_id: str, code: str, text: str, **more: Any) -> None:
        """Append a decision, unless it equals the last one about this run."""
        gist = (code, more.get("shares"))
        if run_id and self._told.get(run_id) == gist:
            return
        self._told[run_id] = gist
        line = {"at": round(self.clock.now(), 3), "run": run_id, "code": code, "text": text, **more}
        self.pool_store.append_decisions([line])

    def _trouble(self, what: str, text: str) -> None:
        if self._troubles.get(what) != text:
            self._troubles[what] = text
            self._record("", "trouble", text)


def _plain_reason(scheduled: ScheduledRun, wanted: Any) -> Reason:
    if not scheduled.may_move:
        return Reason(code="kept", text=f"it is {scheduled.phase}: what it holds stays as it is")
    if not wanted:
        return Reason(code="waits", text="other jobs gain more from these devices")
    return Reason(code="given", text=f"it gets {wanted.devices} devices")
