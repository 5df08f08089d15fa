"""Main module of a node: loads everything once and forks workers that train."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from yunlu.planning.layout import Layout
from yunlu.planning.splitting import layouts_by_count
from yunlu.runs.documents import read_job
from yunlu.runs.events import EnvironmentRecorded
from yunlu.runs.worker_group import read_worker_group
from yunlu.training.attempt import read_attempts
from yunlu.training.determinism import set_deterministic
from yunlu.training.elastic.node import run_node
from yunlu.training.elastic_worker import ElasticWorker, NodeInputs
from yunlu.training.environment import describe_environment
from yunlu.training.parallel.parallel_model import template_of
from yunlu.training.prepare import load_or_make_plan
from yunlu.training.prepare import prepare as prepare_parts
from yunlu.training.probe import probe_machine

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.runs.worker_group import WorkerGroup
    from yunlu.spec.job import Job
    from yunlu.training.elastic.worker_agent import WorkerAgent

_MAX_WORKERS = 64


def load(run: RunStore) -> NodeInputs:
    """Load the data and build the model, once for all workers of this machine."""
    group = read_worker_group(run)
    run.is_quiet = (
        group is not None and group.generation > 0
    )  # a node that joins later repeats no events
    job = read_job(run)
    if _may_partition(job, group):
        # Loaded here once, not during a recovery: sharding imports a compiler, which takes seconds.
        for name in ("yunlu.training.parallel.parallelize", "torch._dynamo"):
            importlib.import_module(name)
    set_deterministic(job.train.deterministic)
    parts = prepare_parts(run, job)
    return NodeInputs(job, parts, template_of(parts.model))


def plan_layouts(run: RunStore, inputs: NodeInputs, devices: int) -> dict[int, Layout]:
    """Make the plan, and the layout for every number of workers."""
    machine = probe_machine()
    run.emit(EnvironmentRecorded(**describe_environment(machine)))
    job = inputs.job.model_copy(update={"devices": devices})
    plan = load_or_make_plan(run, job, inputs.parts, machine, started_at=_attempt_began_at(run))
    return layouts_by_count(plan, job, most=_MAX_WORKERS)


def _may_partition(job: Job, group: WorkerGroup | None) -> bool:
    """Whether a worker may soon hold only a part of the model."""
    if group is None or not group.layouts:
        requested = job.layout
        return not requested.fsdp == requested.tp == requested.pp == 1
    # Layouts of a much larger group are not considered: they are imported when needed.
    nearby = [
        layout for count, layout in group.layouts.items() if count <= 2 * max(group.target, 2)
    ]
    layouts = [Layout.model_validate(layout) for layout in nearby]
    return any(layout.fsdp > 1 or layout.tp > 1 or layout.pp > 1 for layout in layouts)


def _attempt_began_at(run: RunStore) -> float:
    return read_attempts(run)[-1].began_at


def work(agent: WorkerAgent, inputs: NodeInputs) -> None:
    """Train in one generation after another until dismissed."""
    worker = ElasticWorker(agent, inputs)
    while (assignment := agent.wait_assignment()) is not None:
        try:
            worker.run_generation(assignment)
        except Exception as error:
            if not worker.can_continue_after(error):
                raise
            worker.report_paused(detail=str(error).partition("\n")[0][:300])
        finally:
            agent.leave_groups()
    worker.close()


if __name__ == "__main__":
    sys.exit(run_node(prepare=load, plan=plan_layouts, body=work))
