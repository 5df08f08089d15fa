"""Asynchronous worker: takes tickets and pushes gradients to servers, without waiting for other workers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil
import torch

from yunlu.planning.splitting import fit_plan
from yunlu.runs.events import PrecisionChanged, StepSkipped
from yunlu.runs.run_store import Area, require_local
from yunlu.training import loop
from yunlu.training.communication.servers.client import ServerClient
from yunlu.training.communication.servers.engine_adapter import ServerOptimizer, ticket_batches
from yunlu.training.determinism import seed_step
from yunlu.training.device import open_device
from yunlu.training.engine import Engine
from yunlu.training.guard import StepVerdict, diverged
from yunlu.training.memory.out_of_memory import cap_of_worker, memory_capped
from yunlu.training.memory.peak import peak_resident_bytes
from yunlu.training.probe import probe_machine
from yunlu.training.tasks.task import collate_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.communication.servers.rules import Ticket
    from yunlu.training.loop import Step
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import Batch, TrainingInputs


def fit_to_machine(plan: Plan, job: Job, *, slot: int, workers_here: int) -> Plan:
    """The plan for one device of this machine, whose cores are shared by ``workers_here`` workers."""
    open_device(plan.device, slot)
    cores = (psutil.cpu_count() or 1) * plan.layout.world // max(workers_here, 1)
    plan = fit_plan(plan, job, plan.layout, cores=cores)
    torch.set_num_threads(plan.threads)
    return plan


def train_worker(run: RunStore, job: Job, plan: Plan, parts: TrainingInputs, *, name: str) -> None:
    """Train until no ticket is left; ``plan`` is that of one worker."""
    engine = AsyncEngine(
        job, plan, parts, run.emit, servers=require_local(run).directory(Area.SERVERS), name=name
    )
    cap = cap_of_worker(job, probe_machine(), engine.device, workers=engine.client.rules.shares)
    with closing(engine.client), memory_capped(cap):
        loop.run(engine, _TicketCallbacks(engine, run))


class AsyncEngine(Engine):
    """Engine whose weights are held by servers."""

    optimizer: ServerOptimizer
    client: ServerClient

    def __init__(
        self,
        job: Job,
        plan: Plan,
        parts: TrainingInputs,
        emit: Callable[..., Any],
        *,
        servers: Path,
        name: str,
    ) -> None:
        def open_servers(
            _job: Job, _plan: Plan, _model: object, weights: Sequence[Tensor]
        ) -> tuple[ServerOptimizer, None]:
            self.client = ServerClient(servers, weights, worker=name)
            return ServerOptimizer(self.client, weights), None

        super().__init__(job, plan, parts, emit, optimizer_of=open_servers)

    def batches(self) -> Iterator[list[Batch]]:
        """Micro-batches of each ticket; repeated for one that ran out of memory."""
        return ticket_batches(
            self.client,
            self.splits.train,
            collate_for(self.task, self.plan.padding),
            self.order,
            micro_batch=self.micro_batch,
            begin=self._begin_ticket,
            held=self.optimizer.ticket,
            lengths=None if self.plan.padding == "pack" else self.lengths,
            digests=True,
        )

    def _begin_ticket(self, ticket: Ticket, items: int, metrics: Mapping[str, float]) -> None:
        self.steps_done = ticket.step
        # The seed depends on the ticket, not on the worker that does it.
        seed_step(self.job.train.seed, ticket.step, ticket.share, self.device)
        self.optimizer.begin(ticket, items, metrics)

    def judge(self, loss: Tensor, norm: Tensor) -> tuple[float, float, StepVerdict]:
        """As for a single worker, but without rollback: other workers have gone on."""
        loss_value, norm_value, verdict = super().judge(loss, norm)
        self.optimizer.metrics |= {
            "loss": loss_value,
            "grad_norm": norm_value,
            "memory_bytes": peak_resident_bytes(),
        }
        if verdict.action == "rollback":
            verdict = StepVerdict("skip", verdict.reason)
        return loss_value, norm_value, verdict

    def update(self, norm: Tensor) -> bool:
        """Push the gradient; after an overflow the ticket ends without one."""
        is_applied = super().update(norm)
        if not is_applied:
            self.optimizer.skip_ticket()
        return is_applied

    def discard_step(self) -> bool:
        """End a bad ticket without a gradient."""
        self.optimizer.skip_ticket()
        return super().discard_step()

    def skip_step(self) -> None:
        """End a ticket of a step known as bad."""
        self.optimizer.skip_ticket()
        super().skip_step()


class _TicketCallbacks:
    """Reports skipped steps; the coordinator reads everything else from the servers."""

    def __init__(self, engine: Engine, run: RunStore) -> None:
        self._engine, self._run = engine, run

    def before_first_step(self) -> bool:
        return False

    def after_undone_step(self) -> None:
        """No step is ended halfway: a ticket is trained or given back."""

    def before_step(self) -> StepRequest:
        return ""

    def after_step(self, step: Step) -> bool:
        engine, done = self._engine, self._engine.steps_done
        for move in engine.precision.observe(step=done, loss=step.loss):
            self._run.emit(PrecisionChanged(step=done, **asdict(move)))
        if step.is_applied:
            return False
        self._run.emit(
            StepSkipped(
                step=done,
                reason=step.verdict.reason or "overflow",
                loss=step.loss,
                norm=step.norm,
            )
        )
        if step.verdict.action == "fail":
            raise diverged(done, step.loss, step.norm, engine.lr)
        return False
