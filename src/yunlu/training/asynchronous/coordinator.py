"""Who leads asynchronous workers: hears of every step from the servers, evaluates, saves, and ends."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import TrainingError
from yunlu.core.files import read_lines
from yunlu.planning.communication.step_forecast import MethodSetting
from yunlu.planning.schedule import rate
from yunlu.runs.events import AttemptStarted, CommunicationChosen, StateChanged
from yunlu.runs.run_store import Area, Document, Log, last_record, require_local
from yunlu.runs.states import RunState
from yunlu.training.asynchronous.averages import settle_averages
from yunlu.training.asynchronous.rules import make_rules
from yunlu.training.attempt import change_state
from yunlu.training.callbacks import TrainingCallbacks
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.flat import FlatWeights
from yunlu.training.communication.servers.store import prepare, shard_directory
from yunlu.training.data.sample_order import digest_of
from yunlu.training.engine import Engine
from yunlu.training.environment import describe_environment
from yunlu.training.finalize import finalize
from yunlu.training.metric_log import MetricLog
from yunlu.training.probe import probe_machine
from yunlu.training.trackers.registry import TrackerThread, open_trackers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.communication.servers.rules import ServerRules
    from yunlu.training.training_inputs import TrainingInputs

_LOOK_S = 0.1
Done = dict[int, dict[str, Any]]
"""What is known of the tickets of a step, by share."""


class Progress:
    """Steps as the first server lists them: each once, in their order, when all its tickets are done."""

    def __init__(self, servers: Path, rules: ServerRules) -> None:
        self._path = shard_directory(servers, 0) / "done.jsonl"
        self._rules = rules
        self._offset = 0
        self._open: dict[int, Done] = {}
        self.steps = rules.first_step
        """Done so far, without a gap."""

    def read(self) -> Iterator[tuple[int, Done]]:
        """Steps that have ended since; counted from 1."""
        for line, after in read_lines(self._path, offset=self._offset):
            self._offset = after
            if line["step"] >= self.steps:  # a ticket may be told twice
                self._open.setdefault(line["step"], {}).setdefault(line["share"], line)
        while len(self._open.get(self.steps, ())) >= self._rules.needed:
            done = self._open.pop(self.steps)
            self.steps += 1
            yield self.steps, done


class ServedLog(MetricLog):
    """The log of steps that others made."""

    memory_bytes = 0

    def add(self, record: dict[str, Any]) -> None:
        """Take one step; it was done when the last of its tickets was."""
        at = record["at"]
        super().add(record)
        record["at"] = at

    def _memory_bytes(self) -> int:
        return self.memory_bytes


class CoordinatorCallbacks(TrainingCallbacks):
    """Looks on, at weights that were brought here for it."""

    log: ServedLog

    def look(self, *, is_evaluating: bool, is_saving: bool, is_last: bool) -> None:
        """Evaluate and save the weights as they are."""
        metrics: dict[str, float] = {}
        is_better = False
        if is_evaluating:
            metrics, is_better = self._evaluate(last=True)
        is_better = is_better and bool(self._engine.job.train.checkpoint.keep_best)
        if is_saving or is_last or is_better or self.stopped_early:
            self._save(metrics)
        self.log.flush_if_due()


class AsyncCoordinator:
    """One life of the process that leads; another one goes on where it was lost."""

    def __init__(
        self,
        run: RunStore,
        job: Job,
        plan: Plan,
        parts: TrainingInputs,
        *,
        stop: StopRequest,
        life: int,
        goes_on: bool = False,
    ) -> None:
        """``goes_on``: a crew has begun this life, and given way to asynchronous workers."""
        self._goes_on = goes_on
        self._run, self._job, self._plan, self._stop = run, job, plan, stop
        self._engine = Engine(job, plan, parts, run.emit)
        self._trackers = TrackerThread(open_trackers(["tensorboard", *job.trackers]), warn=run.warn)
        log = ServedLog(
            run,
            device=self._engine.device,
            attempt=life,
            forward=lambda values, step: self._trackers.log(values, step=step),
        )
        self._watch = CoordinatorCallbacks(
            self._engine, run, trackers=self._trackers, stop=stop, attempt=life, log=log
        )
        resumed_from = self._watch.resume()
        self._logged = _last_step(run, Log.METRICS)
        self._entered = _last_step(run, Log.LEDGER)
        servers = require_local(run).directory(Area.SERVERS)
        if not servers.exists():
            run.remove(Document.TARGET_WORKERS)  # asked of servers that are gone
            if resumed_from is not None:
                why = "Servers go on" if goes_on else "The servers' directory is gone"
                run.warn(f"{why}: their optimiser begins anew.")
            self._logged = self._entered = self._engine.steps_done
            flat = FlatWeights(self._engine.weights)
            rules = make_rules(job, plan, first_step=self._engine.steps_done)
            prepare(servers, rules, flat.read(), flat.decayed)
        self._client = ServerClient(servers, self._engine.weights, worker="chief")
        self._progress = Progress(servers, self._client.rules)
        self._looked = self._engine.steps_done
        """Steps that were done when the weights were evaluated and saved last."""
        self._is_stopping = False
        self._expected = self._engine.order.steps_from(self._progress.steps)

    def lead(self) -> RunState:
        """See the run through."""
        state, summary = RunState.FAILED, dict[str, Any]()
        # What is told already, not what the servers have: workers may have gone on before us, and
        # whatever they have done since is told as this life's.
        resumed_from = self._logged or None
        self._take_in()
        try:
            is_known = resumed_from is not None or self._goes_on
            self._trackers.start(self._run, self._job, resumed=is_known)
            if not _is_running(self._run):
                self._tell_start(resumed_from)
            while not self._is_through():
                time.sleep(_LOOK_S)
            self._watch.log.flush()
            self._watch.checkpoints.wait()
            state = RunState.STOPPED
            if self._is_at_end():
                machine = probe_machine()
                about = describe_environment(machine)
                summary = finalize(self._run, self._engine, self._watch, about, machine)
                state = RunState.FINISHED
        finally:
            with suppress(OSError, TrainingError):  # whatever failed before is what gets told
                self._watch.log.flush()
            self._watch.checkpoints.close()
            self._client.close()
            self._engine.close()
            self._trackers.finish(state=state, summary=summary)
        return state

    def _tell_start(self, resumed_from: int | None) -> None:
        spec = self._job.communication
        was_told = any(
            isinstance(event, CommunicationChosen) for event, _ in self._run.read_events()
        )
        setting = MethodSetting(method="asynchronous", codec=self._client.rules.codec)
        change_state(self._run, RunState.RUNNING, resumed_from_step=resumed_from)
        self._run.emit(
            CommunicationChosen(
                step=self._progress.steps,
                chosen=setting.name,
                setting=setting.model_dump(),
                guarantee=spec.kept,
                reason=f"{'as before' if was_told else 'the job names it'};"
                f" {_describe_rules(self._client.rules)}",
            )
        )

    def _is_at_end(self) -> bool:
        return self._progress.steps >= self._plan.steps or self._watch.stopped_early

    def _is_through(self) -> bool:
        """Do what is due; whether the last look has been taken."""
        self._take_in()
        is_ending = self._is_at_end() or self._stop.is_set
        if is_ending:
            if not self._is_at_end():
                self._tell_stopping()
            self._client.stop()
        is_evaluating, is_saving = self._is_evaluation_due(), self._is_checkpoint_due()
        if not (is_ending or is_evaluating or is_saving):
            self._watch.log.flush_if_due()
            return False
        weights = self._client.snapshot(self._take_in)
        if weights is None:  # somebody has to come back first
            return False
        self._watch.checkpoints.finish_copy()
        self._client.spread(weights)
        settle_averages(self._engine)
        self._engine.steps_done = self._looked = self._progress.steps
        is_last = self._progress.steps >= self._plan.steps
        was_over = self._watch.stopped_early
        if not was_over:
            self._watch.look(
                is_evaluating=is_evaluating or is_last, is_saving=is_saving, is_last=is_ending
            )
        return is_ending

    def _tell_stopping(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._run.emit(StateChanged(state=RunState.STOPPING, reason="asked to stop"))

    def _is_evaluation_due(self) -> bool:
        every = self._plan.evaluate_every
        by_epoch = self._job.train.evaluate == "epoch"
        return bool(every) and self._turns(every, by_epoch=by_epoch)

    def _is_checkpoint_due(self) -> bool:
        by_epoch = self._job.train.checkpoint.every == "epoch"
        return self._turns(self._plan.checkpoint_every, by_epoch=by_epoch)

    def _turns(self, every: int, *, by_epoch: bool) -> bool:
        """Whether a multiple of so many steps, or an epoch, has passed since we looked."""
        before, now = self._looked, self._progress.steps
        if by_epoch:
            return int(self._engine.order.epoch_at(now)) > int(self._engine.order.epoch_at(before))
        return now // every > before // every

    def _take_in(self) -> None:
        """Write down the steps that have ended since."""
        ledger: list[dict[str, Any]] = []
        for step, done in self._progress.read():
            entry = self._enter(step, list(done.values()))
            if step > self._entered:
                ledger.append(entry)
            if step > self._logged:
                self._log(step, [each for each in done.values() if "loss" in each])
        self._run.append(Log.LEDGER, ledger)

    def _enter(self, step: int, tickets: list[dict[str, Any]]) -> dict[str, Any]:
        """What the ledger has of a step: every sample of it was taken once."""
        samples = sum(int(each.get("samples", 0)) for each in tickets)
        digest = sum(
            (int(each.get("digest_high", 0)) << 32) + int(each.get("digest_low", 0))
            for each in tickets
        ) % (1 << 64)
        expected = next(self._expected)
        if not self._client.rules.backups and digest != digest_of(expected):
            raise TrainingError(
                f"The workers did not take the samples of step {step} once each.",
                hint="Do their data sets differ? Each must see the same samples in the same order.",
            )
        return {"step": step, "generation": 0, "samples": samples, "digest": f"{digest:016x}"}

    def _log(self, step: int, tickets: list[dict[str, Any]]) -> None:
        if not tickets:
            return  # an event told of it; a record holds numbers only
        order, items = self._engine.order, _sum(tickets, "items")
        share = rate(
            self._job.train.schedule,
            step - 1,
            steps=self._plan.steps,
            warmup_steps=self._plan.warmup_steps,
        )
        record = {
            "step": step,
            "epoch": order.epoch_at(step),
            "loss": sum(each["loss"] * each["items"] for each in tickets) / items,
            "lr": self._plan.lr * share,
            "samples": order.samples_before(step),
            "items": int(items),
            "at": max(each["at"] for each in tickets),
            "evaluate_s": 0.0,
            "checkpoint_s": 0.0,
        }
        # Of one worker: each does one of the tickets, in the mean.
        averaged = (
            "grad_norm",
            "data_s",
            "compute_s",
            "communication_s",
            "staleness",
            "sent_bytes",
        )
        for key in averaged:
            record[key] = _sum(tickets, key) / len(tickets)
        if any("compression_error" in each for each in tickets):
            record["compression_error"] = _sum(tickets, "compression_error") / len(tickets)
        if tokens := int(_sum(tickets, "tokens")):
            record["tokens"], record["padding"] = tokens, int(_sum(tickets, "padding"))
        most = max(int(each["memory_bytes"]) for each in tickets)
        self._watch.log.memory_bytes = max(self._watch.log.memory_bytes, most)
        self._watch.log.add(record)


def _sum(tickets: list[dict[str, Any]], key: str) -> float:
    return sum(each.get(key, 0.0) for each in tickets)


def _last_step(run: RunStore, log: Log) -> int:
    last: Mapping[str, Any] | None = last_record(run, log)
    return 0 if last is None else int(last["step"])


def _is_running(run: RunStore) -> bool:
    """Whether this life has begun to train: an earlier chief may have been lost."""
    states = [
        event.state if isinstance(event, StateChanged) else None
        for event, _ in run.read_events()
        if isinstance(event, StateChanged | AttemptStarted)
    ]
    return states[-1] in {RunState.RUNNING, RunState.STOPPING}


def _describe_rules(rules: ServerRules) -> str:
    waiting = {
        "bsp": "workers wait for each other at every step",
        "ssp": f"a step begins at most {rules.staleness} after the oldest that is not over",
        "asp": "no worker waits for another",
    }[rules.mode]
    return f"{waiting}; servers: {rules.shards}"
