"""A rehearsed step takes the memory that the real one takes, and fails where the real one would."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from yunlu.core.errors import ModelError, RehearsalError
from yunlu.planning.layouts import Layout
from yunlu.planning.plan import Plan, Prediction, Rehearsal
from yunlu.spec.job import Job
from yunlu.training.engine import Engine
from yunlu.training.memory.peak import LiveBytes
from yunlu.training.models.adapter import add_adapter
from yunlu.training.rehearsal import rehearse
from yunlu.training.tasks.task import TrainingInputs, collate_for, open_task

WIDTH, LAYERS = 128, 3


def make_job(**model: Any) -> Job:
    args = {"width": WIDTH, "layers": LAYERS, "heads": 4}
    return Job.model_validate(
        {
            "task": "language-modeling",
            "model": {"name": "transformer", "args": args} | model,
            "data": {"train": "synthetic:reviews", "max_length": 64},
        }
    )


def make_plan(layout: Layout | None = None, **settings: Any) -> Plan:
    layout = layout or Layout()
    settings = {"device": "cpu"} | settings
    micro_batch, accumulation = settings.pop("micro_batch", 4), settings.pop("accumulation", 1)
    return Plan(
        threads=1, micro_batch=micro_batch, accumulation=accumulation, layout=layout,
        batch=micro_batch * accumulation * layout.replicas, steps=10, steps_per_epoch=10,
        warmup_steps=0, lr=1e-3, weight_decay=0.01, evaluate_every=0, checkpoint_every=0,
        best_metric="loss", stopping_metric="loss", workers=0, choices=(),
        prediction=Prediction(
            memory_bytes=1, step_s=1, samples_per_s=1, total_s=1, dollars=None
        ),
        **({"kernel": "fused"} | settings),
    )  # fmt: skip


def real_peak(job: Job, plan: Plan) -> int:
    """Peak of the second step of the engine that trains, on the CPU."""
    task = open_task(job.task)
    splits = task.load(job)
    with LiveBytes() as live:
        model = task.build(job)
        if job.model.adapter is not None:
            model = add_adapter(model, job.model.adapter)
        engine = Engine(
            job, plan, TrainingInputs(task=task, model=model, splits=splits), lambda *_: None
        )
        longest = sorted(range(len(splits.train)), key=lambda index: -len(splits.train[index]))
        chosen = [splits.train[index] for index in longest[: plan.micro_batch]]
        micros = [collate_for(task, plan.padding)(chosen)] * min(plan.accumulation, 2)
        items = sum(micro.items for micro in micros)
        for step in range(2):
            if step:
                live.forget_peak()
            loss = engine.accumulate(micros, items)
            assert loss is not None
            loss, norm = engine.norm(loss)
            engine.update(norm)
        engine.close()
    return live.peak


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulation": 4},
    "bf16": {"precision": "bf16"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "one kernel a weight": {"kernel": "single"},
}
LORA = {"adapter": {"rank": 4}}


def test_a_rehearsed_moving_average_takes_what_the_real_one_takes() -> None:
    job = make_job()
    train = job.train.model_copy(update={"ema": 0.9})
    job, plan = job.model_copy(update={"train": train}), make_plan()
    assert rehearse(job, plan).peak_bytes == pytest.approx(real_peak(job, plan), rel=0.03)


def test_a_split_vocabulary_can_be_rehearsed() -> None:
    whole = Layout(tp=2, sequence=True)
    cut = Layout(tp=2, sequence=True, vocabulary=True)
    job = Job.model_validate(
        make_job().model_dump()
        | {
            "data": {
                "train": "synthetic:reviews",
                "max_length": 64,
                "tokenizer": "bpe",
                "vocabulary": 512,
            }
        }
    )
    peaks = [rehearse(job, make_plan(layout)).peak_bytes for layout in (whole, cut)]
    assert peaks[1] < 0.95 * peaks[0]


def test_sharded_gradients_never_pile_up_over_micro_batches() -> None:
    job, layout = make_job(args={"width": 256, "layers": 8, "heads": 4}), Layout(fsdp=8)
    once, often = (
        rehearse(job, make_plan(layout, accumulation=count, micro_batch=1)).peak_bytes
        for count in (1, 2)
    )
    assert often - once < 0.3 * 4 * count_weights(job)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_rehearsed_peak_is_that_of_the_real_step(settings: dict[str, Any]) -> None:
    job, plan = make_job(), make_plan(**settings)
    rehearsed = rehearse(job, plan).peak_bytes
    assert rehearsed == pytest.approx(real_peak(job, plan), rel=0.03)


def test_a_rehearsed_adapter_takes_what_the_real_one_takes() -> None:
    job, plan = make_job(**LORA), make_plan()
    assert rehearse(job, plan).peak_bytes == pytest.approx(real_peak(job, plan), rel=0.03)


def test_a_rehearsed_adapter_trains_only_itself() -> None:
    job, plan = make_job(**LORA), make_plan()
    (rank,) = rehearse(job, plan).ranks
    (full,) = rehearse(make_job(), plan).ranks
    assert rank.parts["optimiser state"] < full.parts["optimiser state"] / 5
    assert rank.parts["weights"] == pytest.approx(full.parts["weights"], rel=0.2)


def count_weights(job: Job) -> int:
    task = open_task(job.task)
    task.load(job)
    model = task.build(job)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("ways", [2, 8])
def test_sharding_divides_weights_and_optimiser_state(ways: int) -> None:
    job = make_job()
    (rank,) = rehearse(job, make_plan(Layout(fsdp=ways))).ranks
    held = 4 * count_weights(job) / ways
    # Uneven rows are padded, and vectors have few of them.
    assert rank.parts["weights"] == pytest.approx(held, rel=0.1)
    assert rank.parts["optimiser state"] == pytest.approx(2 * held, rel=0.1)


def test_sharded_weights_leave_no_lowered_copies_behind() -> None:
    plan = make_plan(Layout(fsdp=8), precision="bf16", recompute="full", micro_batch=1)
    jobs = [make_job(args={"width": 256, "layers": layers, "heads": 4}) for layers in (4, 12)]
    few, many = (rehearse(job, plan).ranks[0].parts["activations"] for job in jobs)
    added = count_weights(jobs[1]) - count_weights(jobs[0])
    # Autocast would keep two bytes of every weight of the model.
    assert many - few < 0.3 * 2 * added


def test_owned_optimiser_state_is_divided_among_replicas() -> None:
    job = make_job()
    (every,) = rehearse(job, make_plan(Layout(dp=4))).ranks
    (owned,) = rehearse(job, make_plan(Layout(dp=4, zero1=True))).ranks
    assert owned.parts["optimiser state"] < 0.4 * every.parts["optimiser state"]
    assert every.parts["gradients"] == pytest.approx(4 * count_weights(job), rel=0.02)


def test_each_pipeline_stage_is_rehearsed() -> None:
    plan = make_plan(Layout(pp=3), accumulation=6, micro_batch=2)
    rehearsal = rehearse(make_job(), plan)
    # From then on a schedule repeats itself: more micro-batches take more time, not more memory.
    many = rehearse(make_job(), plan.model_copy(update={"accumulation": 1000}))
    assert [rank.peak_bytes for rank in many.ranks] == [rank.peak_bytes for rank in rehearsal.ranks]
    assert [rank.rank for rank in rehearsal.ranks] == [0, 1, 2]
    # The first stage holds the activations of all micro-batches that are under way.
    first, *_, last = rehearsal.ranks
    assert first.parts["activations"] > last.parts["activations"]
    # No worker holds the layers of others: of three equal ones a third, and the embedding.
    held = [rank.parts["weights"] for rank in rehearsal.ranks]
    assert max(held) < 0.5 * 4 * count_weights(make_job())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=2, sequence=True, vocabulary=True),
        Layout(fsdp=4, tp=2),
        Layout(dp=2, fsdp=2),
        Layout(pp=2, dp=2, tp=2),
        Layout(pp=3, fsdp=2, schedule="gpipe"),
        Layout(pp=1, dp=2, zero1=True, tp=2),
    ],
    ids=str,
)
def test_every_family_of_layouts_can_be_rehearsed(layout: Layout) -> None:
    alone = rehearse(make_job(), make_plan(accumulation=2)).peak_bytes
    for rank in rehearse(make_job(), make_plan(layout, accumulation=2)).ranks:
        assert 0 < rank.peak_bytes < 2 * alone
        assert sum(rank.parts.values()) == pytest.approx(rank.peak_bytes, rel=1e-6)


class WrongWidth(torch.nn.Module):
    """Its second layer takes more than its first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 8), torch.nn.Linear(9, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images.flatten(1)))


class TwoDevices(torch.nn.Linear):
    """It makes a tensor on the host, wherever the model is."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1)) + torch.zeros(10)


class ReadsValues(torch.nn.Linear):
    """Its shapes depend on values, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1)) + images[images > 0].sum()


class SmallVocabulary(torch.nn.Module):
    """Its embedding has fewer entries than there are tokens."""

    def __init__(self, vocabulary: int, max_length: int) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(80, 8), torch.nn.Linear(8, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


DIGITS = {"task": "image-classification", "data": "sklearn:digits"}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shape": (DIGITS, {}, r"The step fails under single: .* same reduction dim"),
    "devices": (DIGITS, {"device": "cuda"}, "at least two devices, meta and cpu"),
    "vocabulary": ({}, {}, "embedding of 80 entries is asked for number"),
    "heads": ({}, {"layout": Layout(tp=3)}, "4 heads cannot be divided among 3 workers"),
    "stages": ({}, {"layout": Layout(pp=5)}, "3 layers are fewer than 5 stages"),
}
MODELS = {"shape": WrongWidth, "devices": TwoDevices, "vocabulary": SmallVocabulary}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_found_before_anyone_pays(name: str) -> None:
    given, settings, words = WRONG[name]
    job = make_job()
    if name in MODELS:
        model = {"name": f"{__name__}:{MODELS[name].__name__}"}
        job = Job.model_validate(job.model_dump(exclude={"model"}) | {"model": model} | given)
    with pytest.raises(ModelError, match=words):
        rehearse(job, make_plan(**{"layout": Layout(), **settings}))


def test_what_fake_tensors_cannot_do_is_not_blamed_on_the_job() -> None:
    job = Job.model_validate(DIGITS | {"model": f"{__name__}:ReadsValues"})
    with pytest.raises(RehearsalError, match="cannot be rehearsed: DynamicOutputShape"):
        rehearse(job, make_plan())


def test_the_program_answers_with_a_value() -> None:
    given = {
        "job": make_job().model_dump(mode="json"),
        "plan": make_plan(Layout(dp=2)).model_dump(mode="json"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "yunlu.training.rehearsal"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    assert Rehearsal.model_validate(json.loads(done.stdout)["found"]).peak_bytes > 0
