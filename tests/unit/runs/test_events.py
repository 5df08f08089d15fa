"""Events are written, read back, and kept where they are not understood."""

import json
import math
from typing import get_args

import pytest

from tests.sample_events import sample_plan
from yunlu.hardware.fleet import Device
from yunlu.planning.plan import Measurement
from yunlu.runs.events import (
    AttemptStarted,
    BatchChanged,
    CheckpointSaved,
    CommunicationChosen,
    ConfusionCounts,
    DataOpened,
    EnvironmentRecorded,
    ErrorRaised,
    Evaluated,
    ExchangeCandidate,
    ExchangePrediction,
    ExchangeSetting,
    KnownEvent,
    MeasuredLinks,
    MemoryExhausted,
    ModelBuilt,
    ModelExported,
    OperatorTime,
    PhaseTime,
    PlanMade,
    PrecisionChanged,
    PredictionMeasured,
    ProgressReported,
    RefusedSetting,
    RolledBack,
    ScoredExample,
    StateChanged,
    StepSkipped,
    StragglerSeen,
    TraceWritten,
    UnknownEvent,
    WarningRaised,
    WorkerGroupFormed,
    WorkerLost,
    WorkerRank,
    event_fields,
    parse_event,
    to_record,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log
from yunlu.runs.states import RunState

EVERY_KIND = [
    StateChanged(state=RunState.RUNNING, reason="r", resumed_from_step=3, seen_at=1.0),
    AttemptStarted(number=1, pid=2, process_started_at=3.0, began_at=4.0, devices=2),
    EnvironmentRecorded(
        yunlu="1",
        python="3.12",
        platform="Linux",
        hostname="h",
        cores=2,
        memory_bytes=1,
        devices=(Device(kind="cpu", name="c", memory_bytes=1),),
        packages={"torch": "2"},
        argv=("train",),
    ),
    DataOpened(fingerprint="f", source="s", train=3, about={"labels": ["a"]}),
    ModelBuilt(name="mlp", parameters=3, trainable=2),
    PlanMade(plan=sample_plan()),
    Evaluated(
        split="test",
        step=3,
        loss=0.1,
        metrics={"accuracy": 0.5},
        seconds=1.0,
        confusion=ConfusionCounts(labels=("a",), counts=((1,),)),
        examples=(ScoredExample(input="i", expected="e", predicted="p"),),
        rung=1,
    ),
    CheckpointSaved(step=1, path="p", bytes=2, seconds=0.1, metrics={"loss": 1.0}),
    WarningRaised(message="m"),
    ErrorRaised(
        code="c", message="m", hint="h", traceback="t", worker="1", rank=0, host="h", pid=1
    ),
    ModelExported(path="model", files=("a",), from_step=2),
    PredictionMeasured(
        measured=Measurement(
            memory_bytes=1.0, step_s=1.0, samples_per_s=1.0, total_s=1.0, dollars=None
        )
    ),
    StepSkipped(step=1, reason="spike", loss=1.0, norm=2.0),
    RolledBack(step=3, to_step=1, skipping=(2, 3)),
    PrecisionChanged(step=1, module="m", to="full", reason="r", low_share=0.5),
    MemoryExhausted(step=1, micro_batch=2, message="m"),
    TraceWritten(
        path="p",
        first_step=1,
        steps=2,
        wall_s=1.0,
        phases=(PhaseTime(name="data", total_s=1.0, share=1.0),),
        table=(OperatorTime(name="o", self_s=1.0, share=1.0, calls=2),),
    ),
    WorkerGroupFormed(
        generation=1,
        layout="dp1",
        reason="r",
        from_step=0,
        ranks=(WorkerRank(rank=0, worker="0", host="h", pid=1, dp=0),),
        stages=("a",),
    ),
    WorkerLost(cause="killed", worker="0", rank=0, host="h", pid=1, step=3, detail="d"),
    StragglerSeen(worker="0", ratio=1.5, recovered=True),
    CommunicationChosen(
        step=0,
        chosen="ring",
        setting=ExchangeSetting(method="ring"),
        guarantee="exact",
        reason="r",
        predicted=ExchangePrediction(
            step_s=1.0,
            exchange_s=1.0,
            hidden_s=0.5,
            bytes_per_step=1.0,
            steps_factor=1.0,
            one_exchange_s=1.0,
        ),
        candidates=(ExchangeCandidate(name="ring", step_s=1.0, cost_s=1.0),),
        refused=(RefusedSetting(name="topk", reason="r"),),
        links=MeasuredLinks(
            hosts=("a",),
            latency_s=((0.1,),),
            bytes_per_s=((1.0,),),
            send_bytes_per_s=(1.0,),
            receive_bytes_per_s=(1.0,),
        ),
        excluded=(1,),
    ),
    BatchChanged(step=1, batch=2, rate=1.5, gain=1.2, noise_scale=3.0, steps=9),
    ProgressReported(phase="loading data"),
]


@pytest.mark.parametrize("event", EVERY_KIND, ids=lambda event: event.kind)
def test_an_event_of_each_kind_survives_the_trip_through_its_line(event):
    line = json.dumps(to_record(event), allow_nan=False)
    assert parse_event(json.loads(line)) == event


def test_every_kind_is_among_them():
    assert {type(event) for event in EVERY_KIND} == set(get_args(KnownEvent))
    kinds = [event.kind for event in EVERY_KIND]
    assert len(set(kinds)) == len(kinds)


def test_numbers_that_json_lacks_survive_too():
    event = StepSkipped(step=1, reason="not finite", loss=math.nan, norm=math.inf)
    back = parse_event(json.loads(json.dumps(to_record(event), allow_nan=False)))
    assert isinstance(back, StepSkipped)
    assert math.isnan(back.loss)
    assert back.norm == math.inf


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"v": 1, "kind": "teleport", "at": 1.0, "to": "moon"}, "does not match any"),
        ({"v": 2, "kind": "warning", "at": 1.0, "message": "m"}, "v: Input should be 1"),
        ({"v": 1, "kind": "warning", "at": 1.0}, "message: Field required"),
        ({"v": 1, "kind": "warning", "at": 1.0, "message": "m", "more": 1}, "more: Extra"),
    ],
)
def test_a_line_of_another_version_is_kept_as_it_is(record, problem):
    event = parse_event(record)
    assert isinstance(event, UnknownEvent)
    assert (event.kind, event.at) == (record["kind"], 1.0)
    assert problem in event.problem
    assert to_record(event) == record
    assert "kind" not in event_fields(event)


@pytest.mark.parametrize("record", [5, [], None, {}, {"kind": "state"}, {"at": 1.0}])
def test_what_is_no_event_is_none(record):
    assert parse_event(record) is None


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path):
    run = open_run(tmp_path)
    run.emit(WarningRaised(message="first"))
    line = json.dumps(to_record(WarningRaised(message="second")))
    with (tmp_path / Log.EVENTS).open("a") as file:
        file.write(line[:20])
        file.flush()
        assert [event.message for event, _ in run.read_events()] == ["first"]
        file.write(line[20:] + "\n")
    assert [event.message for event, _ in run.read_events()] == ["first", "second"]


def test_a_line_that_a_crash_tore_is_skipped(tmp_path):
    run = open_run(tmp_path)
    with (tmp_path / Log.EVENTS).open("a") as file:
        file.write('{"v": 1, "kind": "warn')
    run.emit(WarningRaised(message="after"))
    ((event, offset),) = run.read_events()
    assert event.message == "after"
    assert offset == (tmp_path / Log.EVENTS).stat().st_size
