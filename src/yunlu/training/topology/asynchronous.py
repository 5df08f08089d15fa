"""Asynchronous workers as a topology: which jobs go, the servers' rules, and the process that ends the run.

It records the steps that workers made, evaluates the weights of the servers, and saves checkpoints.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.core.errors import JobError, TrainingError
from yunlu.core.files import read_lines
from yunlu.planning.communication.step_forecast import MethodSetting
from yunlu.planning.large_batch import rate
from yunlu.runs.events import AttemptStarted, CommunicationChosen, ExchangeSetting, StateChanged
from yunlu.runs.run_store import Area, Document, Log, last_record, require_local
from yunlu.runs.states import RunState
from yunlu.training.attempt import change_state
from yunlu.training.callbacks import MetricLog, TrainingCallbacks
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.rules import ServerRules
from yunlu.training.communication.servers.store import prepare, shard_directory
from yunlu.training.communication.servers.weights import FlatWeights
from yunlu.training.data.batches import step_batches
from yunlu.training.data.sample_order import digest_of
from yunlu.training.hooks.callback import StepReport
from yunlu.training.prepare import load_or_make_plan
from yunlu.training.runner import Topology
from yunlu.training.tasks.task import collate_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.communication import CodecName
    from yunlu.spec.job import Job
    from yunlu.training.attempt import StopRequest
    from yunlu.training.engine import Engine
    from yunlu.training.runner import Runner
    from yunlu.training.single_worker import StepRequest

_POLL_S = 0.1
_SILENCE_S = 120.0
_SILENT_STEPS = 30
"""Step times that a worker may be silent before its ticket is handed out again."""


def check_job(job: Job, *, workers: int) -> None:
    """Reject options that servers do not support, before anything is loaded."""
    train, layout, spec = job.train, job.layout, job.communication
    unsupported = {
        "train.ema": train.ema is not None,
        "train.gradient_release": train.gradient_release,
        "train.adapt_batch": train.adapt_batch is not None,
        "train.schedule: plateau": train.schedule.name == "plateau",
        "train.quantize: int8": train.quantize == "int8",
        "train.precision: fp8": train.precision == "fp8",
        f"train.optimizer: {train.optimizer.name}": train.optimizer.traits.needs_whole_weights,
        "train.optimizer.state: 8bit": train.optimizer.state == "8bit",
        "train.profile": train.profile,
        "layout.zero1": layout.zero1,
    } | {f"layout.{axis}: {size}": size > 1 for axis, size in layout.sizes.items() if axis != "dp"}
    for key, is_requested in unsupported.items():
        if is_requested:
            raise JobError(
                f"{key} cannot be used with communication: asynchronous.",
                hint="Remove it, or choose another method, such as communication: local.",
            )
    if spec.backups >= workers:
        raise JobError(
            f"communication.backups: of {workers} workers, {spec.backups} backups leave none.",
            hint=f"take at most {workers - 1}, or more devices",
        )


def find_async_obstacle(run: RunStore, job: Job, *, workers: int) -> str:
    """Why a run cannot switch to asynchronous workers; empty if it can."""
    if run.has(Document.TRIAL):
        return "it is a trial, and its study could not stop it"
    try:
        check_job(job, workers=workers)
    except JobError as error:
        return error.message.removesuffix(".")
    return ""


def check_plan(plan: Plan) -> None:
    """Reject a layout in which a worker does not hold the complete model."""
    if plan.layout.dp != plan.layout.world:
        raise JobError(
            f"communication: asynchronous needs replicas; the layout is {plan.layout}.",
            hint=f"set layout to dp{plan.devices}, or communication to auto",
        )


def build_server_rules(job: Job, plan: Plan, *, first_step: int) -> ServerRules:
    """How the servers of a run hold, hand out and update weights."""
    spec = job.communication
    # Codecs of others are refused with the job: servers know only these.
    codec = "none" if spec.codec == "auto" else cast("CodecName", spec.codec)
    return ServerRules(
        steps=plan.steps,
        first_step=first_step,
        # On one machine a second server would only take CPU time from a worker.
        shards=1 if spec.servers == "auto" else spec.servers,
        mode=spec.consistency,
        staleness=spec.staleness,
        correction=spec.correction,
        shares=plan.layout.world,
        backups=spec.backups,
        codec=codec,
        # Weights have no error feedback: what a lossy codec drops is not sent later.
        pull_codec=codec if codec in {"none", "bf16"} else "fp16",
        codec_share=spec.keep,
        optimizer=job.train.optimizer,
        weight_decay=plan.weight_decay,
        l2=job.train.l2,
        silence_s=max(_SILENCE_S, _SILENT_STEPS * plan.prediction.step_s),
    )


StepTickets = dict[int, dict[str, Any]]
"""Records of the tickets of a step, by share."""


class ServerProgress:
    """Steps completed by the servers: each once, in order, when all its tickets are done."""

    def __init__(self, servers: Path, rules: ServerRules) -> None:
        self._path = shard_directory(servers, 0) / "done.jsonl"
        self._rules = rules
        self._offset = 0
        self._open: dict[int, StepTickets] = {}
        self.steps = rules.first_step
        """Consecutive steps completed."""

    def read(self) -> Iterator[tuple[int, StepTickets]]:
        """Steps completed since the last call, counted from 1."""
        for line, after in read_lines(self._path, offset=self._offset):
            self._offset = after
            if line["step"] >= self.steps:  # a ticket may be recorded twice
                self._open.setdefault(line["step"], {}).setdefault(line["share"], line)
        while len(self._open.get(self.steps, ())) >= self._rules.needed:
            done = self._open.pop(self.steps)
            self.steps += 1
            yield self.steps, done


class AsyncMetricLog(MetricLog):
    """Metric log of steps that workers made."""

    memory_bytes = 0

    def add(self, record: dict[str, Any]) -> None:
        """Add a step; its time is that of its last ticket."""
        at = record["at"]
        super().add(record)
        record["at"] = at

    def _memory_bytes(self) -> int:
        return self.memory_bytes


class CoordinatorCallbacks(TrainingCallbacks):
    """Callbacks on weights pulled from the servers."""

    log: AsyncMetricLog

    def evaluate_and_save(self, *, is_evaluating: bool, is_saving: bool, is_last: bool) -> None:
        """Evaluate and save the current weights."""
        metrics: dict[str, float] = {}
        is_better = False
        if is_evaluating:
            metrics, is_better = self._evaluate(last=True)
        is_better = is_better and bool(self._engine.job.train.checkpoint.keep_best)
        if is_saving or is_last or is_better or self.stopped_early:
            self._save(metrics)
        self.log.flush_if_due()


class AsyncTopology(Topology):
    """Asynchronous workers, as their coordinator sees them; a new coordinator continues if one is lost.

    Args:
        devices: Workers of the supervisor.
        shares: Tickets per step, if other workers take part from the start.
        continues_attempt: A worker group started this attempt and switched to asynchronous training.
    """

    stop: StopRequest
    """Set in the coordinator's process."""
    _client: ServerClient
    _progress: ServerProgress

    def __init__(
        self, *, devices: int, shares: int | None = None, continues_attempt: bool = False
    ) -> None:
        self._devices, self._shares = devices, shares
        self.continues_attempt = continues_attempt
        self._is_stopping = False

    def make_plan(self, runner: Runner, *, started_at: float) -> Plan:
        """In a child of the supervisor: measuring starts threads, which a fork would lose."""
        machine, shares = runner.machine, self._shares
        if machine.gpus and shares:  # one per worker, on any machine
            machine = machine.model_copy(update={"devices": (machine.best_device,) * shares})
        sized_job = runner.job.model_copy(update={"devices": shares or self._devices})
        return load_or_make_plan(
            runner.run, sized_job, runner.inputs, machine, started_at=started_at
        )

    def open_callbacks(self, runner: Runner) -> CoordinatorCallbacks:
        """Callbacks on weights pulled from the servers."""
        log = AsyncMetricLog(
            runner.run,
            device=runner.engine.device,
            attempt=runner.attempt,
            forward=runner.log_to_trackers,
        )
        return CoordinatorCallbacks(
            runner.engine,
            runner.run,
            trackers=runner.trackers,
            stop=self.stop,
            attempt=runner.attempt,
            hooks=runner.hooks,
            log=log,
        )

    def begin(self, runner: Runner) -> None:
        """Continue with the servers' weights, or create the servers from the newest checkpoint."""
        assert isinstance(runner.callbacks, CoordinatorCallbacks)
        self._run, self._job, self._plan = runner.run, runner.job, runner.plan
        self._engine, self._callbacks = runner.engine, runner.callbacks
        self._open_servers(self._callbacks.resume())
        # The step logged last, not the servers' step: what workers have done since then is logged
        # by this attempt.
        resumed_from = self._logged_step or None
        self._record_steps()
        is_known = resumed_from is not None or self.continues_attempt
        runner.trackers.start(self._run, self._job, resumed=is_known)
        if not _is_running(self._run):
            self._report_start(resumed_from)

    def _open_servers(self, resumed_from: int | None) -> None:
        run, engine = self._run, self._engine
        self._logged_step = _last_step(run, Log.METRICS)
        self._ledger_step = _last_step(run, Log.LEDGER)
        servers = require_local(run).directory(Area.SERVERS)
        if not servers.exists():
            run.remove(Document.TARGET_WORKERS)  # was for servers that no longer exist
            if resumed_from is not None:
                cause = (
                    "Training switches to servers"
                    if self.continues_attempt
                    else "The servers' directory is missing"
                )
                run.warn(f"{cause}: the optimizer state is reset.")
            self._logged_step = self._ledger_step = engine.steps_done
            flat = FlatWeights(engine.weights)
            rules = build_server_rules(self._job, self._plan, first_step=engine.steps_done)
            prepare(servers, rules, flat.read(), flat.decayed)
        self._client = ServerClient(servers, engine.weights, worker="coordinator")
        self._progress = ServerProgress(servers, self._client.rules)
        self._evaluated_step = engine.steps_done
        """Step at which the weights were last evaluated and saved."""
        self._expected = engine.order.steps_from(self._progress.steps)

    def run_steps(self, runner: Runner) -> StepRequest:  # noqa: ARG002
        """Follow the workers until the last step, or until the run is to stop."""
        while not self._is_finished():
            time.sleep(_POLL_S)
        return ""

    def release(self, runner: Runner, state: RunState) -> None:
        """Leave the servers, too."""
        super().release(runner, state)
        if hasattr(self, "_client"):  # not if it never began
            self._client.close()

    def _report_start(self, resumed_from: int | None) -> None:
        spec = self._job.communication
        was_reported = any(
            isinstance(event, CommunicationChosen) for event, _ in self._run.read_events()
        )
        setting = MethodSetting(method="asynchronous", codec=self._client.rules.codec)
        change_state(self._run, RunState.RUNNING, resumed_from_step=resumed_from)
        self._run.emit(
            CommunicationChosen(
                step=self._progress.steps,
                chosen=setting.name,
                setting=ExchangeSetting.model_validate(setting.model_dump()),
                guarantee=spec.kept,
                reason=f"{'as before' if was_reported else 'set by the job'};"
                f" {_describe_rules(self._client.rules)}",
            )
        )

    def _is_at_end(self) -> bool:
        return self._progress.steps >= self._plan.steps or self._callbacks.stopped_early

    def _is_finished(self) -> bool:
        """Do what is due; returns whether the final evaluation and checkpoint are done."""
        self._record_steps()
        self._callbacks.hooks.call_checkpoints()
        request = self._callbacks.hooks.request
        is_ending = self._is_at_end() or self.stop.is_set or bool(request)
        if is_ending:
            if not self._is_at_end():
                self._report_stopping()
            self._client.stop()
        is_evaluating = self._is_evaluation_due() or request == "finish"
        is_saving = self._is_checkpoint_due()
        if not (is_ending or is_evaluating or is_saving):
            self._callbacks.log.flush_if_due()
            return False
        weights = self._client.snapshot(self._record_steps)
        if weights is None:  # a server must come back first
            return False
        self._callbacks.checkpoints.finish_copy()
        self._client.set_weights(weights)
        recompute_averages(self._engine)
        self._engine.steps_done = self._evaluated_step = self._progress.steps
        is_last = self._progress.steps >= self._plan.steps
        was_over = self._callbacks.stopped_early
        if not was_over:
            self._callbacks.evaluate_and_save(
                is_evaluating=is_evaluating or is_last, is_saving=is_saving, is_last=is_ending
            )
            if request == "finish":
                self._callbacks.stopped_early = True
        return is_ending

    def _report_stopping(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            reason = self._callbacks.hooks.reason or "asked to stop"
            self._run.emit(StateChanged(state=RunState.STOPPING, reason=reason))

    def _is_evaluation_due(self) -> bool:
        every = self._plan.evaluate_every
        by_epoch = self._job.train.evaluate == "epoch"
        return bool(every) and self._is_due(every, by_epoch=by_epoch)

    def _is_checkpoint_due(self) -> bool:
        by_epoch = self._job.train.checkpoint.every == "epoch"
        return self._is_due(self._plan.checkpoint_every, by_epoch=by_epoch)

    def _is_due(self, every: int, *, by_epoch: bool) -> bool:
        """Whether a multiple of ``every`` steps, or an epoch, was completed since the last evaluation."""
        before, now = self._evaluated_step, self._progress.steps
        if by_epoch:
            return int(self._engine.order.epoch_at(now)) > int(self._engine.order.epoch_at(before))
        return now // every > before // every

    def _record_steps(self) -> None:
        """Log the steps completed since the last call."""
        ledger: list[dict[str, Any]] = []
        for step, done in self._progress.read():
            entry = self._ledger_entry(step, list(done.values()))
            if step > self._ledger_step:
                ledger.append(entry)
            if step > self._logged_step:
                self._log(step, [ticket for ticket in done.values() if "loss" in ticket])
        self._run.append(Log.LEDGER, ledger)

    def _ledger_entry(self, step: int, tickets: list[dict[str, Any]]) -> dict[str, Any]:
        """Ledger entry of a step; checks that each sample was used once."""
        samples = sum(int(ticket.get("samples", 0)) for ticket in tickets)
        digest = sum(
            (int(ticket.get("digest_high", 0)) << 32) + int(ticket.get("digest_low", 0))
            for ticket in tickets
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
            return  # reported as an event; records hold only finite numbers
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
            "loss": sum(ticket["loss"] * ticket["items"] for ticket in tickets) / items,
            "lr": self._plan.lr * share,
            "samples": order.samples_before(step),
            "items": int(items),
            "at": max(ticket["at"] for ticket in tickets),
            "evaluate_s": 0.0,
            "checkpoint_s": 0.0,
        }
        # Means per worker: on average each worker does one ticket.
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
        if any("compression_error" in ticket for ticket in tickets):
            record["compression_error"] = _sum(tickets, "compression_error") / len(tickets)
        if tokens := int(_sum(tickets, "tokens")):
            record["tokens"], record["padding"] = tokens, int(_sum(tickets, "padding"))
        peak = max(int(ticket["memory_bytes"]) for ticket in tickets)
        self._callbacks.log.memory_bytes = max(self._callbacks.log.memory_bytes, peak)
        self._callbacks.log.add(record)
        if self._callbacks.hooks.has_step_hooks:
            self._callbacks.hooks.call_step(_describe(record))


def _describe(record: dict[str, Any]) -> StepReport:
    named = {name: record[name] for name in ("step", "epoch", "loss", "lr", "grad_norm", "samples")}
    seconds = record["data_s"] + record["compute_s"] + record["communication_s"]
    return StepReport(**named, seconds=seconds)


def _sum(tickets: list[dict[str, Any]], key: str) -> float:
    return sum(ticket.get(key, 0.0) for ticket in tickets)


def _last_step(run: RunStore, log: Log) -> int:
    last: Mapping[str, Any] | None = last_record(run, log)
    return 0 if last is None else int(last["step"])


def _is_running(run: RunStore) -> bool:
    """Whether this attempt has begun to train: an earlier coordinator may have been lost."""
    states = [
        event.state if isinstance(event, StateChanged) else None
        for event, _ in run.read_events()
        if isinstance(event, StateChanged | AttemptStarted)
    ]
    return states[-1] in {RunState.RUNNING, RunState.STOPPING}


def _describe_rules(rules: ServerRules) -> str:
    waiting = {
        "bsp": "workers wait for each other at every step",
        "ssp": f"a step begins at most {rules.staleness} steps after the oldest incomplete one",
        "asp": "no worker waits for another",
    }[rules.mode]
    return f"{waiting}; servers: {rules.shards}"


# Batch-norm averages: each worker's own cover its past weights; those of the current weights are better
# (Wu and Johnson 2021, "Rethinking Batch in BatchNorm").

_SAMPLES = 2048
"""Approximate number of samples to average over."""


def recompute_averages(engine: Engine) -> None:
    """Recompute the running averages of batch norms for the current weights."""
    norms = _batch_norms(engine.model)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    was_training = engine.model.training
    engine.model.train()
    steps = min(max(_SAMPLES // engine.order.batch, 1), engine.order.steps_per_epoch)
    batches = step_batches(
        engine.splits.train,
        collate_for(engine.task, engine.plan.padding),
        engine.order,
        micro_batch=engine.micro_batch,
        first_step=0,
        steps=steps,
        workers=0,
        lengths=None if engine.plan.padding == "pack" else engine.lengths,
    )
    with torch.no_grad():
        for micros in batches:
            for micro in micros:
                with engine.precision.forward():
                    engine.task.loss(engine.model, micro.to(engine.device))
    engine.model.train(was_training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
