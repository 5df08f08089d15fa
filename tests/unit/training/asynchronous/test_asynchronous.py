"""What servers are asked for, what they are spared, and how steps are read back from them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.parity import STEPS, Recorder, Sentences, make_job, make_plan
from tests.waiting import LIMIT_S
from yunlu.core.errors import JobError
from yunlu.core.files import append_lines, read_lines
from yunlu.planning.layouts import Layout
from yunlu.planning.plan import Plan
from yunlu.runs.events import MemoryExhausted, StateChanged
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.asynchronous.worker import AsyncEngine, train_worker
from yunlu.training.attempt import StopRequest, begin_attempt
from yunlu.training.communication.servers.rules import ServerRules
from yunlu.training.communication.servers.server import ShardServer
from yunlu.training.communication.servers.store import Shard, prepare, shard_directory
from yunlu.training.communication.servers.weights import FlatWeights
from yunlu.training.engine import Engine
from yunlu.training.runner import Runner
from yunlu.training.tasks.task import Batch, TrainingInputs
from yunlu.training.topology.asynchronous import (
    AsyncTopology,
    ServerProgress,
    build_server_rules,
    check_job,
    recompute_averages,
)


def job(**train: Any) -> Job:
    extra = {key: train.pop(key) for key in ("layout", "communication") if key in train}
    return Job.model_validate(
        {
            "task": "classification",
            "model": "mlp",
            "data": {"train": "x.csv"},
            "communication": "asynchronous",
            "train": train,
            **extra,
        }
    )


def test_an_ordinary_job_is_served():
    check_job(job(), workers=2)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ({"ema": 0.99}, "train.ema"),
        ({"optimizer": {"name": "lamb"}}, "train.optimizer: lamb"),
        ({"optimizer": {"state": "8bit"}}, "train.optimizer.state: 8bit"),
        ({"schedule": "plateau"}, "train.schedule: plateau"),
        ({"quantize": "int8"}, "train.quantize: int8"),
        ({"layout": {"tp": 2}}, "layout.tp: 2"),
        ({"layout": {"dp": 2, "zero1": True}}, "layout.zero1"),
    ],
)
def test_what_servers_cannot_do_is_refused_by_its_name(words: dict[str, Any], key: str):
    with pytest.raises(JobError, match=f"^{key} cannot be used"):
        check_job(job(**words), workers=2)


def test_backups_for_all_workers_are_refused():
    asked = {"method": "asynchronous", "consistency": "bsp", "backups": 2}
    with pytest.raises(JobError, match="2 backups leave none"):
        check_job(job(communication=asked), workers=2)


def test_steps_come_in_their_order_and_once_each(tmp_path: Path):
    (tmp_path / "shard-0").mkdir()
    done = tmp_path / "shard-0" / "done.jsonl"

    def complete(*tickets: tuple[int, int]) -> list[int]:
        append_lines(done, [{"step": step, "share": share} for step, share in tickets])
        return [step for step, _ in progress.read()]

    progress = ServerProgress(tmp_path, ServerRules(steps=9, first_step=3, shares=2))
    assert complete((3, 0), (4, 0), (4, 1)) == []  # one of the first step is missing
    assert complete((3, 0), (5, 0)) == []  # told twice
    assert complete((3, 1)) == [4, 5]
    assert complete((3, 1), (4, 1)) == []  # told again after all was done
    assert complete((5, 1)) == [6]
    assert progress.steps == 6


def test_a_step_need_not_wait_for_backups(tmp_path: Path):
    (tmp_path / "shard-0").mkdir()
    rules = ServerRules(steps=9, mode="bsp", shares=3, backups=1)
    append_lines(
        tmp_path / "shard-0" / "done.jsonl", [{"step": 0, "share": 2}, {"step": 0, "share": 0}]
    )
    assert [sorted(done) for _, done in ServerProgress(tmp_path, rules).read()] == [[0, 2]]


class Short(Sentences):
    """For whom three samples at once are too many."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        if batch.samples > 2:
            raise torch.OutOfMemoryError("out of memory")
        return super().loss(model, batch)


@contextmanager
def served(run: RunStore, rules: ServerRules, model: nn.Module) -> Generator[None]:
    flat = FlatWeights([weight for weight in model.parameters() if weight.requires_grad])
    prepare(run.path / Area.SERVERS, rules, flat.read(), flat.decayed)
    with serving(run, rules):
        yield


@contextmanager
def serving(run: RunStore, rules: ServerRules) -> Generator[None]:
    with ExitStack() as stack:
        for index in range(rules.shards):
            server = ShardServer(
                Shard(shard_directory(run.path / Area.SERVERS, index)), "127.0.0.1"
            )
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            stack.callback(thread.join, 20)
            stack.callback(server.stop)
        yield


def make_parts(task: Sentences, job: Job) -> TrainingInputs:
    return TrainingInputs(task=task, model=task.build(job), splits=task.load(job))


def train_alone(job: Job, plan: Plan, parts: TrainingInputs) -> list[float]:
    engine, recorder = Engine(job, plan, parts, lambda *_, **__: None), Recorder([], [])
    loop.run(engine, recorder)
    engine.close()
    return recorder.losses


def test_workers_that_wait_for_each_other_train_as_one_alone_though_memory_runs_short(
    tmp_path: Path,
):
    run, job = open_run(tmp_path), make_job(clip={"norm": None})
    plan = make_plan(Layout(dp=2), job, micro_batch=4, kernel="fused")
    asked = {"method": "asynchronous", "consistency": "bsp", "servers": 2}
    rules = build_server_rules(
        Job.model_validate({**job.model_dump(), "communication": asked}), plan, first_step=0
    )
    every = [make_parts(task, job) for task in (Sentences(), Short())]
    with served(run, rules, every[0].model):
        group = [
            threading.Thread(
                target=train_worker,
                args=(run, job, plan, parts),
                kwargs={"name": str(number)},
                daemon=True,
            )
            for number, parts in enumerate(every)
        ]
        for worker in group:
            worker.start()
        for worker in group:
            worker.join(LIMIT_S)
    steps = dict(ServerProgress(run.path / Area.SERVERS, rules).read())
    found = [
        sum(each["loss"] * each["items"] for each in done.values())
        / sum(each["items"] for each in done.values())
        for done in steps.values()
    ]
    assert found == pytest.approx(train_alone(job, plan, make_parts(Sentences(), job)), abs=1e-4)
    assert {each["worker"] for done in steps.values() for each in done.values()} == {"0", "1"}
    told = [event for event, _ in run.read_events() if isinstance(event, MemoryExhausted)]
    assert [event.micro_batch for event in told] == [2]
    assert len(steps) == STEPS


class Hand:
    """A worker that does one ticket when it is told to."""

    def __init__(self, run: RunStore, job: Job, plan: Plan) -> None:
        parts = make_parts(Sentences(), job)
        self._engine = AsyncEngine(
            job, plan, parts, run.emit, servers=run.path / Area.SERVERS, name="hand"
        )
        self._batches = self._engine.batches()

    def work(self, tickets: int) -> None:
        for _ in range(tickets):
            next(self._batches)
            self._engine.optimizer.metrics |= {"loss": 1.0, "grad_norm": 1.0, "memory_bytes": 1}
            self._engine.optimizer.skip_ticket()

    def close(self) -> None:
        self._engine.client.close()
        self._engine.close()


def test_a_stopped_run_goes_on_after_the_last_step_it_logged_though_workers_begin_first(
    tmp_path: Path,
):
    run, asked = open_run(tmp_path), {"method": "asynchronous", "servers": 2}
    job = Job.model_validate({**make_job().model_dump(), "communication": asked})
    plan = make_plan(Layout(dp=2), job, micro_batch=16, kernel="fused")
    rules = build_server_rules(job, plan, first_step=0)
    kept: list[int] = []
    for attempt, tickets_before_the_coordinator, contextual in ((1, 3, served), (2, 1, serving)):
        begin_attempt(run)
        stop = StopRequest()
        stop.set()
        given = (make_parts(Sentences(), job).model,) if contextual is served else ()
        with contextual(run, rules, *given):
            hand = Hand(run, job, plan)
            # The second of two shares of the second step is done in the second attempt, by a worker
            # that is there before the coordinator is.
            hand.work(tickets_before_the_coordinator)
            topology = AsyncTopology(devices=2)
            topology.stop = stop
            runner = Runner(run, job, topology, attempt=attempt)
            runner.plan, runner.inputs = plan, make_parts(Sentences(), job)
            assert runner.train() is RunState.STOPPED
            hand.close()
        kept.append(max(record["step"] for record, _ in run.read_metrics()))
    told = [event for event, _ in run.read_events() if isinstance(event, StateChanged)]
    resumed = [each.resumed_from_step for each in told if each.state == "running"]
    assert kept == [1, 2]
    assert resumed == [None, 1]
    assert [record["step"] for record, _ in run.read_metrics()] == [1, 2]
    assert [line["step"] for line, _ in read_lines(run.path / Log.LEDGER)] == [1, 2]
    saved = [event.step for event, _ in run.read_events() if event.kind == "checkpoint"]
    assert saved == kept


def test_running_averages_are_those_of_the_weights_at_hand():
    job = make_job()
    parts = make_parts(Sentences("normed"), job)
    plan = make_plan(Layout(), job, micro_batch=16, kernel="fused")
    engine = Engine(job, plan, parts, lambda *_, **__: None)
    norm = engine.model.get_submodule("norm")
    assert isinstance(norm, nn.BatchNorm1d)
    recompute_averages(engine)
    with torch.no_grad():
        ids = torch.stack(
            [parts.splits.train[number] for number in range(len(parts.splits.train))]
        )[:, :-1].to(engine.device)
        expected = engine.model.get_submodule("embedding")(ids).flatten(0, 1)
    torch.testing.assert_close(norm.running_mean, expected.mean(0), rtol=0, atol=1e-5)
    assert norm.momentum == 0.1
