"""The watch of a worker among others: one of them speaks, all of them decide alike."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from yunlu.core.errors import TrainingError
from yunlu.runs.events import StateChanged
from yunlu.runs.run_store import Log, last_record
from yunlu.runs.states import RunState
from yunlu.training.callbacks import StopRequest, TrainingCallbacks
from yunlu.training.data.sample_order import digest_of
from yunlu.training.evaluate import Score
from yunlu.training.memory.resident import peak_resident_bytes
from yunlu.training.metric_log import MetricLog
from yunlu.training.parallel.redistribute import broadcast_json, gather_json
from yunlu.training.tasks.task import Evaluation
from yunlu.training.trial_control import PruneDecision

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore
    from yunlu.training.checkpoint.save_group import SaveGroup
    from yunlu.training.communication.step_sync import StepRequest
    from yunlu.training.engine import Engine
    from yunlu.training.loop import Step
    from yunlu.training.trackers.registry import TrackerThread

_REMEMBERED = 1024
"""Steps that everyone remembers: whoever leads next tells what the last leader could not."""


class WorkerControl(Protocol):
    """What asks things of a worker among others, and hears how it does: a member of a crew."""

    @property
    def wants_pause(self) -> bool:
        """Whether to end the loop at the next step's start."""
        ...

    @property
    def wants_stop(self) -> bool:
        """Whether to save and be done at the next step's start."""
        ...

    def check(self) -> None:
        """Raise where the generation is over."""
        ...

    def request_exclusion(self) -> None:
        """Leave as soon as may be: the others are faster without this worker."""
        ...

    def report_progress(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        step_s: float | None = None,
        wait_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """Hear of progress."""
        ...


class Unsupervised:
    """Stands where a member of a crew stands: nobody listens, and only signals ask for anything."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self.wants_pause = False

    @property
    def wants_stop(self) -> bool:
        """Whether a signal came."""
        return self._stop.is_set

    def check(self) -> None:
        """Nobody breaks anything off."""

    def request_exclusion(self) -> None:
        """All stand before the same step then: those who stay meet anew."""
        self.wants_pause = True

    def report_progress(self, **_: Any) -> None:
        """Nobody listens."""


class WorkerGroupLog(MetricLog):
    """The log and the ledger of the steps; everyone knows them, the leader writes them."""

    def __init__(
        self,
        run: RunStore,
        *,
        device: torch.device,
        life: int,
        forward: Callable[[dict[str, float], int], None],
    ) -> None:
        super().__init__(run, device=device, life=life, forward=forward)
        self._ledger: list[dict[str, Any]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._recent_ledger: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._generation = 0
        self._leads = False

    def begin(self, generation: int, step: int, *, leads: bool) -> None:
        """A generation begins after ``step`` steps: who remembers what is not written yet writes it."""
        self._generation, self._leads = generation, leads
        self._pending.clear()
        self._ledger.clear()
        records = _missing(self._recent, self._run, Log.METRICS, step)
        entries = _missing(self._recent_ledger, self._run, Log.LEDGER, step)
        self.forget_after(step)
        known = gather_json(len(records) + len(entries))
        rank = dist.get_rank() if dist.is_initialized() else 0
        if any(known) and known.index(max(known)) == rank:
            self._run.append(Log.METRICS, records)
            self._run.append(Log.LEDGER, entries)

    def add(self, record: dict[str, Any]) -> None:
        """Take one step."""
        record["generation"] = self._generation
        super().add(record)
        record.setdefault("memory_bytes", peak_resident_bytes())
        self._recent.append(record)

    def forget_after(self, step: int) -> None:
        """The run went back: later steps are not to be told again by whoever leads next."""
        self._recent = _up_to(self._recent, step)
        self._recent_ledger = _up_to(self._recent_ledger, step)

    def enter(self, step: int, samples: int, digest: int) -> None:
        """Put the samples of a finished step into the ledger."""
        record = {
            "step": step,
            "generation": self._generation,
            "samples": samples,
            "digest": f"{digest:016x}",
        }
        self._ledger.append(record)
        self._recent_ledger.append(record)

    def flush(self) -> None:
        """Write what is pending, where this worker leads."""
        if not self._leads:
            self._pending.clear()
            self._ledger.clear()
            return
        super().flush()
        records, self._ledger = self._ledger, []
        if records:
            self._run.append(Log.LEDGER, records)


class WorkerGroupCallbacks(TrainingCallbacks):
    """Looks on in every worker; only the leader writes."""

    log: WorkerGroupLog

    def __init__(
        self,
        engine: Engine,
        run: RunStore,
        *,
        agent: WorkerControl,
        crew: SaveGroup,
        log: WorkerGroupLog,
        trackers: TrackerThread,
        life: int,
        keep: Callable[[float], None],
        forget_after: Callable[[int], None],
    ) -> None:
        """``keep`` is called at the end of each step, with its seconds: a time for copies.

        ``forget_after`` is called when the run went back to a step.
        """
        super().__init__(
            engine, run, trackers=trackers, stop=StopRequest(), life=life, crew=crew, log=log
        )
        self._agent, self._keep, self._forget_after = agent, keep, forget_after
        self._phase = "first step"
        """What the main thread does while it does not wait for others."""
        engine.note_waiting = self._note_waiting
        self._follow(engine.steps_done)

    def begin(self, generation: int) -> None:
        """A generation begins where the engine stands."""
        done, world = self._engine.steps_done, self._engine.world
        self._follow(done)
        self.log.begin(generation, done, leads=world.is_leader)

    def _follow(self, step: int) -> None:
        """Know which samples the steps from this one on take."""
        self._followed = self._engine.order
        self._order, self._ordered = self._followed.steps_from(step), step

    def track(self, trackers: TrackerThread) -> None:
        """Tell these from now on."""
        self._trackers = trackers

    def begin_phase(self, phase: str) -> None:
        """Something long begins that is not a step."""
        self._phase = phase
        self._agent.report_progress(phase=phase)

    def _note_waiting(self, *, is_over: bool = False) -> None:
        self._agent.report_progress(phase=self._phase if is_over else "sync")

    def before_step(self) -> StepRequest:
        """Ask the others for what the supervisor asked of us."""
        self._agent.check()
        if self._engine.communication.is_aside:
            self._agent.request_exclusion()
        if self._agent.wants_stop or self._is_ruled_out():
            return "stop"
        return "pause" if self._agent.wants_pause else ""

    def after_step(self, step: Step) -> bool:
        """As alone; the step goes into the ledger, and the supervisor hears of it."""
        done = self._engine.steps_done
        self._phase = "step"
        self._check_samples(step, done - 1)
        self.log.enter(done, step.samples, step.digest)
        step_s = step.compute_s + step.wait_s + step.data_s
        self._agent.report_progress(
            step=done,
            phase="step",
            step_s=step_s,
            wait_s=step.wait_s,
            memory_bytes=peak_resident_bytes(),
        )
        is_over = super().after_step(step)
        self._keep(step_s)
        return is_over

    def is_to_be_saved(self) -> bool:
        """After a stop, by all workers: it may have been the study of a trial that gave it up."""
        if self._trial_control is None:
            return True
        ruling = self._trial_control.peek(self.rung) if self._engine.world.is_leader else None
        self.decision = _pass_on(ruling)
        if self.decision is None:
            return True
        self._run.emit(StateChanged(state=RunState.STOPPING, reason=self.decision.reason))
        return self.decision.kind == "hold"

    def _is_ruled_out(self) -> bool:
        """Between evaluations the leader asks the others to stop; at one all hear it, see below."""
        if self._trial_control is None or not self._engine.world.is_leader:
            return False
        return self._trial_control.peek(self.rung) is not None

    def _heed_gate(self, *, is_rung: bool) -> PruneDecision | None:
        if self._trial_control is None or not is_rung:
            return None
        ruling = None
        self._engine.synchronize()
        if self._engine.world.is_leader:
            self._agent.report_progress(phase="evaluate")
            ruling = self._trial_control.ask(self.rung, keep_waiting=self._is_wanted)
        else:
            self._note_waiting()
        ruling = _pass_on(ruling)
        self._agent.report_progress(phase=self._phase)
        return ruling

    def _is_wanted(self) -> bool:
        self._agent.check()
        return not self._agent.wants_stop

    def score(self, split: str, *, step: int | None = None) -> Score:
        """The first replica evaluates; all learn what it found."""
        before, self._phase = self._phase, "evaluate"
        self._engine.synchronize()
        self._agent.report_progress(phase="evaluate")
        found = super().score(split, step=step) if self._engine.world.place.dp == 0 else None
        started_at = perf_counter()
        told = broadcast_json(
            None
            if found is None
            else {"loss": found.loss, "evaluation": found.evaluation.model_dump(mode="json")},
            source=0,
        )
        self._phase = before
        self._agent.report_progress(phase=before)
        # All go by the same figures: they decide on what all must do together.
        return Score(
            loss=float(told["loss"]),
            evaluation=Evaluation.model_validate(told["evaluation"]),
            seconds=perf_counter() - started_at if found is None else found.seconds,
        )

    def _save(self, metrics: dict[str, float]) -> None:
        self._engine.synchronize()
        self._agent.report_progress(phase="checkpoint")
        super()._save(metrics)
        self._agent.report_progress(phase=self._phase)

    def _is_in_doubt(self) -> bool:
        is_in_doubt, engine = super()._is_in_doubt(), self._engine
        if engine.communication.communicator.is_apart:
            # Each judges steps of its own, and all save or nobody does.
            return bool(engine.world.sum_over_all(torch.tensor([int(is_in_doubt)])))
        return is_in_doubt

    def _roll_back(self, step: Step) -> None:
        super()._roll_back(step)
        done = self._engine.steps_done
        self.log.forget_after(done)
        self._forget_after(done)

    def _check_samples(self, step: Step, number: int) -> None:
        """Every sample of the step was taken by one worker, and once; else nothing can be trusted."""
        if number != self._ordered or self._followed is not self._engine.order:
            self._follow(number)  # after a rollback, or with another batch
        (indices,) = islice(self._order, 1)
        self._ordered = number + 1
        if step.digest != digest_of(indices):
            raise TrainingError(
                f"The workers did not take the samples of step {number + 1} once each.",
                hint="Do their data sets differ? Each must see the same samples in the same order.",
            )


def _pass_on(ruling: PruneDecision | None) -> PruneDecision | None:
    """The leader's, on all workers."""
    told = broadcast_json(None if ruling is None else asdict(ruling), source=0)
    return None if told is None else PruneDecision(**told)


def _up_to(recent: deque[dict[str, Any]], step: int) -> deque[dict[str, Any]]:
    return deque((record for record in recent if record["step"] <= step), maxlen=_REMEMBERED)


def _missing(
    recent: deque[dict[str, Any]], run: RunStore, log: Log, step: int
) -> list[dict[str, Any]]:
    last = last_record(run, log)
    written = 0 if last is None else int(last["step"])
    return [record for record in recent if written < record["step"] <= step]
