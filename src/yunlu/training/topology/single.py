"""One worker: nobody to agree with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from yunlu.planning.layouts import Layout
from yunlu.planning.planner import cap_bytes
from yunlu.planning.splitting import fit_plan
from yunlu.runs.states import RunState
from yunlu.training import loop
from yunlu.training.attempt import change_state
from yunlu.training.callbacks import TrainingCallbacks
from yunlu.training.memory.out_of_memory import memory_capped
from yunlu.training.prepare import prepare
from yunlu.training.runner import Topology

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.training.attempt import StopRequest
    from yunlu.training.runner import Runner
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import Task, TrainingInputs


class SingleTopology(Topology):
    """One worker, in its own process or in a user's."""

    def __init__(self, stop: StopRequest, *, task: Task | None, plan_only: bool) -> None:
        """``task`` is given where a user's own process trains."""
        self._stop, self._task, self._plan_only = stop, task, plan_only

    def load(self, runner: Runner) -> TrainingInputs:
        """Load the data and build the model, unless the user's task holds them."""
        return prepare(runner.run, runner.job, self._task)

    def make_plan(self, runner: Runner, *, started_at: float) -> Plan:
        """The plan for one worker; that of an earlier attempt may be for several."""
        plan = super().make_plan(runner, started_at=started_at)
        if plan.layout.is_single:
            return plan
        return fit_plan(plan, runner.job, Layout(), cores=runner.machine.cores)

    def why_not_train(self) -> str:
        """A request to plan only."""
        return "only the plan was requested" if self._plan_only else ""

    def open_callbacks(self, runner: Runner) -> TrainingCallbacks:
        """Callbacks that write everything themselves."""
        return TrainingCallbacks(
            runner.engine,
            runner.run,
            trackers=runner.trackers,
            stop=self._stop,
            attempt=runner.attempt,
            hooks=runner.hooks,
            interruptible=self._stop.interrupting,
        )

    def interruptible(self) -> AbstractContextManager[None]:
        """A signal ends it at once."""
        return self._stop.interrupting(may_exit=True)

    def begin(self, runner: Runner) -> None:
        """Resume from the newest checkpoint, if there is one."""
        resumed_from = runner.callbacks.resume()
        runner.trackers.start(runner.run, runner.job, resumed=resumed_from is not None)
        change_state(runner.run, RunState.RUNNING, resumed_from_step=resumed_from)

    def run_steps(self, runner: Runner) -> StepRequest:
        """Train under the memory limit of the job, traced where it asks for that."""
        if runner.callbacks.is_complete:
            return ""
        with memory_capped(cap_bytes(runner.job, runner.machine)), _tracing(runner):
            return loop.run(runner.engine, runner.callbacks)

    def leave(self, runner: Runner, request: StepRequest) -> RunState | None:
        """End as a callback asked."""
        if request in {"finish", "stop"}:
            runner.callbacks.end_on_request(request)
        return None

    def end(self, runner: Runner, state: RunState) -> RunState:
        """Report the state, and why a trial ended, or what a callback asked for."""
        decision, stop_reason = runner.callbacks.decision, runner.callbacks.hooks.reason
        reason = decision.reason if decision is not None else stop_reason
        return change_state(runner.run, state, **({"reason": reason} if reason else {}))


def _tracing(runner: Runner) -> AbstractContextManager[None]:
    if not runner.job.train.profile:
        return nullcontext()
    from yunlu.training.trace import traced  # noqa: PLC0415 - the profiler is slow to import

    return traced(runner.engine, runner.run)
