"""The program of a node: everything is loaded once; every worker forked from it trains."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from yunlu.planning.layout import Layout
from yunlu.planning.splitting import layouts_by_count
from yunlu.runs.documents import read_job
from yunlu.runs.events import EnvironmentRecorded
from yunlu.runs.worker_group import read_crew
from yunlu.training.attempt import read_attempts
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.node import run_node
from yunlu.training.elastic_worker import ElasticWorker, NodeInputs
from yunlu.training.environment import describe_environment
from yunlu.training.parallel.parallel_model import pattern_of
from yunlu.training.prepare import load_or_make_plan
from yunlu.training.prepare import prepare as prepare_parts
from yunlu.training.probe import probe_machine

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.worker_group import Crew
    from yunlu.spec.job import Job
    from yunlu.training.elastic.worker_agent import WorkerAgent

_MOST_WORKERS = 64


def load(run: RunStore) -> NodeInputs:
    """Read the data and build the model, once for all workers of this machine."""
    crew = read_crew(run)
    run.is_quiet = crew is not None and crew.generation > 0  # a node that joins: all is told
    job = read_job(run)
    if _may_cut(job, crew):
        # Seconds, spent once here rather than in the middle of a recovery: sharding loads a compiler.
        for name in ("yunlu.training.parallel.parallelize", "torch._dynamo"):
            importlib.import_module(name)
    set_deterministic(job.train.deterministic)
    parts = prepare_parts(run, job)
    return NodeInputs(job, parts, pattern_of(parts.model))


def lay_out(run: RunStore, loaded: NodeInputs, devices: int) -> dict[int, Layout]:
    """Settle the plan, and how the work is split for any number of workers."""
    machine = probe_machine()
    run.emit(EnvironmentRecorded(**describe_environment(machine)))
    job = loaded.job.model_copy(update={"devices": devices})
    plan = load_or_make_plan(run, job, loaded.parts, machine, started_at=_began_at(run))
    return layouts_by_count(plan, job, most=_MOST_WORKERS)


def _may_cut(job: Job, crew: Crew | None) -> bool:
    """Whether a worker may soon come to hold less than the whole model."""
    if crew is None or not crew.layouts:
        asked = job.layout
        return not asked.fsdp == asked.tp == asked.pp == 1
    # Of a crew that grows far beyond what it is, the layouts need not be at hand: they are loaded then.
    near = [found for count, found in crew.layouts.items() if count <= 2 * max(crew.target, 2)]
    every = [Layout.model_validate(found) for found in near]
    return any(layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1 for layout in every)


def _began_at(run: RunStore) -> float:
    return read_attempts(run)[-1].began_at


def work(agent: WorkerAgent, loaded: NodeInputs) -> None:
    """A worker's whole life."""
    worker = ElasticWorker(agent, loaded)
    while (assignment := agent.wait_assignment()) is not None:
        try:
            worker.take_part(assignment)
        except Exception as error:
            if not worker.outlives(error):
                raise
            worker.settle(detail=str(error).partition("\n")[0][:300])
        finally:
            agent.leave_groups()
    worker.close()


if __name__ == "__main__":
    sys.exit(run_node(prepare=load, plan=lay_out, body=work))
