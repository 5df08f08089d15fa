"""What two jobs have in common is what their steps have in common, and nothing beyond."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.integration.toy_study import ToySlots, toy_job
from tests.sample_events import sample, sample_plan
from yunlu.planning.large_batch import rate
from yunlu.runs.events import CheckpointSaved, DataOpened, Evaluated, PlanMade
from yunlu.runs.run_store import Document
from yunlu.spec.job import Job
from yunlu.spec.load import job_from_mapping
from yunlu.tuning.setup import create_study
from yunlu.tuning.study_runner.trial_runs import (
    TrialEvents,
    TrialStarter,
    can_share_prefix,
    find_length,
    shared_rung,
    shared_steps,
)
from yunlu.tuning.values import Dimension

SAMPLES, BATCH = 640, 32
NAMES = ("constant", "linear", "cosine", "wsd")
ANY_SCHEDULE = st.fixed_dictionaries(
    {"name": st.sampled_from(NAMES)},
    optional={
        "warmup": st.sampled_from((0, 3, 10, 0.1)),
        "final": st.sampled_from((0.0, 0.1, 1.0)),
        "decay": st.sampled_from((0.2, 0.5, 1.0)),
    },
)
ANY_LENGTH = st.one_of(
    st.fixed_dictionaries({"epochs": st.sampled_from((1, 2.5, 4))}),
    st.fixed_dictionaries({"steps": st.sampled_from((1, 30, 77))}),
)


def make_job(schedule: Any = "wsd", *, name: str = "one", **train: Any) -> Job:
    mapping = {
        "task": "tabular-classification",
        "model": "mlp",
        "data": "sklearn:iris",
        "name": name,
    }
    return job_from_mapping(mapping | {"train": {"schedule": schedule, "batch": BATCH, **train}})


def shared(one: Job, other: Job) -> int:
    return shared_steps(one, other, samples=SAMPLES, plan=sample_plan(batch=BATCH))


def rates(job: Job) -> list[float]:
    course = find_length(job, samples=SAMPLES, batch=BATCH)
    return [
        rate(job.train.schedule, step, steps=course.steps, warmup_steps=course.warmup_steps)
        for step in range(course.steps)
    ]


@given(ANY_SCHEDULE, ANY_SCHEDULE, ANY_LENGTH, ANY_LENGTH)
def test_shared_steps_are_those_with_the_same_rates(
    first: Any, second: Any, long: Any, short: Any
) -> None:
    one, other = make_job(first, **long), make_job(second, **short)
    ours, theirs = rates(one), rates(other)
    pairs = list(zip(ours, theirs, strict=False))
    expected = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert shared(one, other) == shared(other, one) == expected


def test_a_stable_rate_is_shared_until_it_falls() -> None:
    one = make_job({"name": "wsd", "warmup": 0, "decay": 0.25}, steps=100)
    other = make_job({"name": "wsd", "warmup": 0, "decay": 0.5}, steps=100)
    assert shared(one, other) == 51  # the first step of the fall is still at the peak


def test_names_and_checkpoints_train_nothing() -> None:
    one, other = make_job(steps=50), make_job(steps=50, name="other", checkpoint=7)
    assert shared(one, other) == 50


def test_jobs_that_differ_early_share_nothing() -> None:
    one = make_job(steps=50)
    differing: tuple[dict[str, Any], ...] = (
        {"optimizer": {"lr": 0.5}},
        {"seed": 3},
        {"batch": 16},
        {"label_smoothing": 0.1},
        {"ema": 0.9},
        {"early_stopping": 3},
        {"evaluate": 5},
    )
    for train in differing:
        assert shared(one, make_job(steps=50, **train)) == 0
    growing = make_job(steps=50, grow_batch=1)
    assert shared(growing, make_job(steps=50, grow_batch=1, name="other")) == 0
    plateau = make_job({"name": "plateau", "factor": 0.1}, steps=50)
    assert shared(plateau, make_job({"name": "plateau", "factor": 0.5}, steps=50)) == 0
    assert shared(plateau, plateau) == 50


def test_only_evaluations_with_a_checkpoint_that_the_other_makes_too_count() -> None:
    one = make_job({"name": "wsd", "warmup": 0, "decay": 0.5}, steps=45)
    other = make_job({"name": "constant", "warmup": 0}, steps=100)
    steps = {1: 10, 2: 20, 3: 30, 4: 40, 5: 45}

    def make_story(*saved: int, every: int = 10) -> TrialEvents:
        events = TrialEvents()
        events.apply_event(sample(DataOpened, train=SAMPLES))
        events.apply_event(sample(PlanMade, batch=BATCH, evaluate_every=every, steps=45))
        for rung, step in steps.items():
            events.apply_event(sample(Evaluated, rung=rung, step=step))
        for step in saved:
            events.apply_event(sample(CheckpointSaved, step=step, path="a"))
        return events

    events = make_story(10, 20, 45)
    assert events.plan is not None
    assert shared_steps(one, other, samples=SAMPLES, plan=events.plan) == 23
    assert shared_rung(one, other, events) == 2
    assert shared_rung(one, one, events) == 2  # the last one was only made because it ended there
    assert shared_rung(one, other, make_story(10, 45)) == 1
    assert shared_rung(one, other, make_story(10, 20, 45, every=0)) == 0


def test_a_space_shares_where_something_acts_late_and_the_rest_can_agree() -> None:
    late = Dimension(name="train.schedule.decay", low=0.1, high=1.0)
    length = Dimension(name="train.epochs", choices=(1, 2))
    warmup = Dimension(name="train.schedule.warmup", choices=(1, 2))
    listed = Dimension(name="train.optimizer.lr", choices=(0.1, 0.2))
    ranged = Dimension(name="train.optimizer.lr", low=0.1, high=0.2)
    assert can_share_prefix([late])
    assert can_share_prefix([length, listed])
    assert not can_share_prefix([warmup])
    assert not can_share_prefix([listed])
    assert not can_share_prefix([late, ranged])


def test_a_trial_that_others_may_go_on_from_keeps_a_checkpoint_of_each_rung() -> None:
    space = {"train.epochs": [2, 6], "train.optimizer.lr": [0.1, 0.2]}
    records = create_study(toy_job(space=space, method="grid"), name="long")
    assert records.request.rungs == 6
    number = records.begin({"train.epochs": 6, "train.optimizer.lr": 0.1}, until=6)
    run = TrialStarter(records, ToySlots()).make_run(number)
    job = Job.model_validate_json((run.path / Document.JOB).read_bytes())
    assert job.train.checkpoint.keep_last >= 6
