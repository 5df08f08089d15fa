"""A node that trains nothing, but loses nothing either: every step consumes its samples once."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from yunlu.planning.layouts import Layout
from yunlu.runs.events import StateChanged
from yunlu.runs.run_store import Document, RunStore
from yunlu.training.elastic.messages import Assignment
from yunlu.training.elastic.node import run_node
from yunlu.training.elastic.worker_agent import WorkerAgent

BATCH = 12
ENOUGH = "enough"
"""A file of this name in the run's directory ends the training at the next step."""


def prepare(run: RunStore) -> dict[str, Any]:
    job = json.loads((run.path / Document.JOB).read_text())
    if job.get("fail") == "prepare":
        raise ValueError("the data are not there")
    return job


def plan(run: RunStore, job: dict[str, Any], devices: int) -> dict[int, Layout]:
    if job.get("fail") == "plan":
        raise ValueError("no layout fits")
    return {count: Layout(**{job["axis"]: count}) for count in range(1, 9)}


class State:
    """``counts[i]``: how often sample i was consumed; cut like weights under fsdp."""

    def __init__(self, samples: int) -> None:
        self.step = 0
        self.counts = dict.fromkeys(range(samples), 0)

    def cut(self, layout: Layout, rank: int) -> None:
        place = layout.place_of(rank)
        self.counts = {i: n for i, n in self.counts.items() if i % layout.fsdp == place.fsdp}


def body(agent: WorkerAgent, job: dict[str, Any]) -> None:
    state = State(job["steps"] * BATCH)
    torch.set_num_threads(1)
    while (assignment := agent.wait_assignment()) is not None:
        try:
            if assignment.departing:
                with agent.handoff_group(assignment):
                    state = pass_state(assignment, state, job)
                if assignment.is_departing:
                    continue
            world = agent.join_world(assignment)
            if not assignment.departing:
                state = pass_state(assignment, state, job)
            assert assignment.rank is not None
            state.cut(assignment.layout, assignment.rank)
            agent.state_restored(assignment, state.step)
            if assignment.rank == 0 and assignment.generation == 1:
                agent.run.emit(StateChanged(state="running"))
            ending = train(agent, assignment, state, job)
            if ending is None:
                agent.report_paused(state.step, live=True)
                continue
            counts = gather(assignment, state)
            if assignment.rank == 0:
                found = {"step": state.step, "counts": [counts[i] for i in sorted(counts)]}
                (agent.run.path / "result.json").write_text(json.dumps(found))
            world.sum_over_all(torch.zeros(1))
            if job.get("linger") and assignment.rank == 0 and assignment.generation == 1:
                agent.report_progress(phase="export")
                time.sleep(600)
            agent.report_done(ending, state.step)
        except Exception as error:
            if not agent.is_broken(error):
                raise
            # Counts change only after the last collective of a step: what we hold is whole.
            sys.stderr.write(f"broken after step {state.step}: {error!r}\n")
            agent.report_paused(state.step, live=True, detail=str(error)[:200])
        finally:
            agent.leave_groups()


def train(agent: WorkerAgent, assignment: Assignment, state: State, job: dict[str, Any]) -> Any:
    layout, rank = assignment.layout, assignment.rank or 0
    while state.step < job["steps"]:
        agent.check()
        began = time.perf_counter()
        if job.get("fail") == "step" and state.step == 3 and rank == 1:
            raise ValueError("rank 1 cannot go on")
        slow = job.get("slow_s", 0) if rank == 1 else 0
        time.sleep(job["step_s"] + slow)
        first = state.step * BATCH
        mine = range(first + layout.replica_of(rank), first + BATCH, layout.replicas)
        used = torch.zeros(BATCH + 3, dtype=torch.int64)
        for sample in mine:
            used[sample - first] += 1
        enough = (agent.run.path / ENOUGH).exists()
        used[-3:] = torch.tensor([agent.wants_pause, agent.wants_stop, enough])
        agent.report_progress(phase="sync")
        waited = time.perf_counter()
        if not layout.is_single:
            dist.all_reduce(used)
        wait_s = time.perf_counter() - waited
        *found, pause, stop, over = used.tolist()
        for offset, count in enumerate(found):
            if first + offset in state.counts:
                state.counts[first + offset] += count
        state.step += 1
        agent.report_progress(
            step=state.step, phase="step", step_s=time.perf_counter() - began, wait_s=wait_s
        )
        if over:
            break
        if stop:
            return "stopped"
        if pause:
            return None
    return "finished"


def pass_state(assignment: Assignment, state: State, job: dict[str, Any]) -> State:
    """Every giver tells all what it holds; everyone puts the whole together."""
    restore = assignment.restore
    if not restore.sources:
        return State(job["steps"] * BATCH)
    if not restore.needs_transfer:
        return state
    whole = State(job["steps"] * BATCH)
    whole.step = restore.step or 0
    for giver in restore.sources:
        if assignment.handoff_size == 1:
            whole.counts |= state.counts
            continue
        text = (
            json.dumps(list(state.counts.items()))
            if giver.handoff_rank == assignment.handoff_rank
            else ""
        )
        whole.counts |= dict(_broadcast_text(text, giver.handoff_rank))
    return whole


def gather(assignment: Assignment, state: State) -> dict[int, int]:
    counts = dict(state.counts)
    for rank in range(assignment.layout.world if assignment.layout.world > 1 else 0):
        text = json.dumps(list(state.counts.items())) if rank == assignment.rank else ""
        counts |= dict(_broadcast_text(text, rank))
    return counts


def _broadcast_text(text: str, source: int) -> Any:
    size = torch.tensor([len(text)])
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if text:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.broadcast(data, source)
    return json.loads(bytes(data.tolist()))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(run_node(prepare=prepare, plan=plan, body=body))
