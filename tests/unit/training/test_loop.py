"""The loop's promises: accumulation is exact, resuming is exact, trouble is told and loses nothing."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.sample_events import EventT
from yunlu.executors.worker_process import worker_lock_is_free
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    ErrorRaised,
    Evaluated,
    ModelExported,
    StateChanged,
    WarningRaised,
)
from yunlu.runs.run_store import Area, Document, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.training.checkpoint import files
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.scoring import loss_sum
from yunlu.training.tasks.task import Batch, Evaluation, Splits
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def events(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def exported(run: RunStore) -> dict[str, Tensor]:
    return load_file(run.path / Area.MODEL / "model.safetensors")


class Words:
    """Sequences of uneven length with ignored targets: what breaks naive accumulation."""

    metric = "loss"

    def load(self, job: Job) -> Splits:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(1, 12, (96,), generator=generator).tolist()
        samples = [torch.randint(0, 20, (size + 1,), generator=generator) for size in lengths]
        return Splits(train=samples, validation=None, test=None, fingerprint="words")

    def build(self, job: Job) -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)).double()

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        padded = nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=-100)
        targets = padded[:, 1:]
        return Batch(
            inputs=(padded[:, :-1].clamp(min=0),),
            targets=targets,
            samples=len(samples),
            items=int((targets != -100).sum()),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        logits = model(*batch.inputs)
        flat = logits.reshape(-1, 20)
        return nn.functional.cross_entropy(flat, batch.targets.reshape(-1), reduction="sum"), logits

    def scorer(self) -> Any:
        class NoScore:
            def add(self, outputs: Any, batch: Batch) -> None: ...

            def result(self) -> Evaluation:
                return Evaluation(metrics={})

        return NoScore()


@pytest.mark.parametrize("micro_batch", [16, 7, 1])
def test_accumulated_micro_batches_train_like_one_batch_despite_uneven_token_counts(
    make_run: MakeRun, micro_batch: int
) -> None:
    settings = {"steps": 12, "batch": 64, "optimizer": {"name": "adamw", "lr": 0.05}}
    whole, split = make_run(**settings), make_run(**settings, micro_batch=micro_batch)
    assert live(whole.path, task=Words()) is RunState.FINISHED
    assert live(split.path, task=Words()) is RunState.FINISHED
    assert losses(split) == pytest.approx(losses(whole), rel=1e-6)
    # Exported in FP32: the FP64 weights agree to better than FP32 can show.
    for name, weight in exported(whole).items():
        torch.testing.assert_close(exported(split)[name], weight, rtol=0, atol=1e-7)


class Interrupted(ObjectTask):
    """Asks its own process to stop when the run computes its ``passes``-th training loss."""

    def __init__(self, *, run: RunStore, passes: int, data: Any) -> None:
        super().__init__(model=network(), data=data)
        self._run, self._left = run, passes

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        if model.training and b'"running"' in (self._run.path / Log.EVENTS).read_bytes():
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


def points(count: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long() + (inputs[:, 2] > 1).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"optimizer": {"name": "momentum", "nesterov": True}, "l2": 1e-3, "l1": 1e-4},
        {"optimizer": "adam", "schedule": {"name": "plateau", "patience": 1}},
        {"optimizer": "adamw", "ema": 0.9, "micro_batch": 5},
        {"optimizer": "lamb", "schedule": {"name": "wsd"}},
        {"optimizer": "lars", "schedule": "linear", "precision": "bf16"},
        {"optimizer": {"name": "adamw", "lr": 0.01}, "precision": "fp16"},
        {"optimizer": {"kernel": "foreach"}, "clip": "adaptive", "grow_batch": 2},
        {"optimizer": {"kernel": "single"}, "clip": None, "gradient_release": True},
    ],
    ids=lambda options: str(options["optimizer"]),
)
def test_a_stopped_and_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    make_run: MakeRun, options: dict[str, Any]
) -> None:
    settings = {"epochs": 6, "batch": 20, **options}
    whole, broken = make_run(**settings), make_run(**settings)
    data = points()
    assert live(whole.path, task=ObjectTask(model=network(), data=data)) is RunState.FINISHED
    task = Interrupted(run=broken, passes=11, data=data)
    assert live(broken.path, task=task) is RunState.STOPPED
    stopped_at = events(broken, CheckpointSaved)[-1].step
    assert 0 < stopped_at < max(losses(whole))
    assert live(broken.path, task=ObjectTask(model=network(), data=data)) is RunState.FINISHED
    assert losses(broken) == losses(whole)
    for name, weight in exported(whole).items():
        assert torch.equal(exported(broken)[name], weight), name
    scores = [[e.loss for e in events(run, Evaluated)] for run in (broken, whole)]
    assert scores[0] == scores[1]


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(make_run: MakeRun) -> None:
    first, again, other = (make_run(steps=8, batch=16, seed=seed) for seed in (5, 5, 6))
    for run in (first, again, other):
        live(run.path, task=ObjectTask(model=network(), data=points()))
    assert losses(first) == losses(again)
    assert losses(first) != losses(other)


def test_measuring_before_the_plan_changes_nothing_in_the_training(make_run: MakeRun) -> None:
    measured, planned = make_run(steps=8, batch=16), make_run(steps=8, batch=16)
    live(measured.path, task=ObjectTask(model=network(), data=points()))
    (planned.path / Document.PLAN).write_bytes(
        (measured.path / Document.PLAN).read_bytes()
    )  # this one skips the measuring
    live(planned.path, task=ObjectTask(model=network(), data=points()))
    assert losses(measured) == losses(planned)


def test_a_loss_that_is_not_finite_ends_the_run_with_advice_and_keeps_the_checkpoint(
    make_run: MakeRun,
) -> None:
    class Poison(ObjectTask):
        calls = 0

        def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
            loss, outputs = super().loss(model, batch)
            self.calls += model.training
            return (loss * float("nan") if self.calls > 30 else loss), outputs

    run = make_run(steps=60, batch=20, checkpoint=5, evaluate="never")
    assert live(run.path, task=Poison(model=network(), data=points())) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert error.code == "training"
    assert "not finite at step" in error.message
    assert "train.optimizer.lr" in error.hint
    kept = sorted(path.name for path in (run.path / Area.CHECKPOINTS).iterdir())
    assert kept, "the checkpoints from before the trouble are there"
    live(run.path, task=ObjectTask(model=network(), data=points()))
    assert events(run, StateChanged)[-1].state == "finished"


def test_a_gradient_that_is_not_finite_is_never_scored_or_saved(make_run: MakeRun) -> None:
    class Cliff(ObjectTask):
        calls = 0

        def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
            loss, outputs = super().loss(model, batch)
            self.calls += model.training
            # The root's value at 0 is 0, its slope is not finite.
            return (loss + (0 * outputs).sqrt().sum() if self.calls > 30 else loss), outputs

    run = make_run(steps=60, batch=20, checkpoint=1, evaluate=1)
    assert live(run.path, task=Cliff(model=network(), data=points())) is RunState.FAILED
    assert "gradient is not finite" in events(run, ErrorRaised)[0].message
    assert all(math.isfinite(float(e.loss)) for e in events(run, Evaluated))
    saved = list((run.path / Area.CHECKPOINTS).glob("step-*/rank-*.safetensors"))
    assert saved
    for path in saved:
        assert all(torch.isfinite(weight).all() for weight in load_file(path).values()), path


def test_a_checkpoint_is_published_after_the_log_of_its_steps(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker killed right after a save would otherwise leave a hole in the curves for good."""
    run, seen = make_run(steps=12, batch=20, checkpoint=3), list[tuple[int, int]]()
    publish = files.publish

    def look(*args: Any, **settings: Any) -> files.CheckpointEntry:
        (snapshot,) = (value for value in args if isinstance(value, files.Snapshot))
        seen.append((snapshot.step, max(losses(run), default=0)))
        return publish(*args, **settings)

    monkeypatch.setattr(files, "publish", look)
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    assert {3, 6, 9, 12} <= {step for step, _ in seen}
    assert all(logged >= step for step, logged in seen)


def test_the_model_is_on_the_disk_before_it_is_published(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is never resumed: a power cut right after it must not take its model."""
    run, flushed, fsync = make_run(steps=4, batch=20), set[int](), os.fsync

    def note(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    files_of_model = [path for path in (run.path / Area.MODEL).rglob("*") if path.is_file()]
    assert len(files_of_model) >= 3
    assert all(path.stat().st_ino in flushed for path in files_of_model)


def test_early_stopping_ends_a_run_that_no_longer_improves(make_run: MakeRun) -> None:
    noise = torch.randn(80, 6), torch.randint(0, 3, (80,))
    run = make_run(epochs=50, batch=16, early_stopping={"patience": 3, "metric": "loss"})
    assert live(run.path, task=ObjectTask(model=network(), data=noise)) is RunState.FINISHED
    assert max(losses(run)) < 50 * 4


def test_the_best_checkpoint_is_what_is_tested_and_exported(make_run: MakeRun) -> None:
    run = make_run(epochs=30, batch=16, optimizer={"name": "sgd", "lr": 3.0}, clip={"norm": None})
    live(run.path, task=ObjectTask(model=network(), data=points()))
    scored = [e for e in events(run, Evaluated) if e.split == "validation"]
    best = max(scored, key=lambda e: (e.metrics["accuracy"], -e.loss))
    assert best is not scored[-1], "the run must get worse again for this to mean something"
    assert events(run, ModelExported)[-1].from_step == best.step


def test_a_resumed_run_refuses_data_that_changed(make_run: MakeRun) -> None:
    run = make_run(epochs=6, batch=20)
    task = Interrupted(run=run, passes=9, data=points())
    assert live(run.path, task=task) is RunState.STOPPED
    inputs, targets = points()
    changed = inputs.clone()
    changed[:] += 1
    outcome = live(run.path, task=ObjectTask(model=network(), data=(changed, targets)))
    assert outcome is RunState.FAILED
    assert "data has changed" in events(run, ErrorRaised)[-1].message


def test_a_damaged_checkpoint_is_passed_over_and_said_so(make_run: MakeRun) -> None:
    settings = {"epochs": 6, "batch": 20, "checkpoint": 4, "evaluate": "never"}
    whole, run = make_run(**settings), make_run(**settings)
    live(whole.path, task=ObjectTask(model=network(), data=points()))
    assert live(run.path, task=Interrupted(run=run, passes=10, data=points())) is (RunState.STOPPED)
    newest = max((run.path / Area.CHECKPOINTS).iterdir()) / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    assert any("does not match its checksum" in e.message for e in events(run, WarningRaised))
    assert losses(run) == losses(whole)


def test_two_workers_never_share_a_run(make_run: MakeRun) -> None:
    run = make_run(steps=4, batch=20)

    class Nested(ObjectTask):
        def load(self, job: Job) -> Splits:
            assert live(run.path, task=ObjectTask(model=network(), data=points())) is (
                RunState.FAILED
            )
            return super().load(job)

    assert live(run.path, task=Nested(model=network(), data=points())) is RunState.FINISHED
    assert not events(run, ErrorRaised)
    assert len(events(run, AttemptStarted)) == 1


def test_a_process_forked_while_training_does_not_keep_the_run_busy(make_run: MakeRun) -> None:
    children: list[Any] = []

    class Forking(ObjectTask):
        def build(self, job: Job) -> nn.Module:
            children.append(
                multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            )
            children[0].start()
            return super().build(job)

    run = make_run(steps=4, batch=20)
    try:
        assert live(run.path, task=Forking(model=network(), data=points())) is RunState.FINISHED
        assert children[0].is_alive()
        assert worker_lock_is_free(run)
    finally:
        children[0].kill()
        children[0].join()


def test_a_model_that_does_not_fit_its_data_is_named_with_the_shapes(make_run: MakeRun) -> None:
    run = make_run(steps=4, batch=20)
    assert live(run.path, task=ObjectTask(model=nn.Linear(5, 3), data=points())) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert error.code == "model"
    assert "(2, 6)" in error.hint  # the first pass of a run of 80 samples takes no more


def test_a_batch_larger_than_the_data_is_refused(make_run: MakeRun) -> None:
    run = make_run(steps=4, batch=500)
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert "only 72 training samples" in error.message


def test_an_unknown_metric_is_refused_before_the_first_step(make_run: MakeRun) -> None:
    run = make_run(steps=4, batch=20, early_stopping={"metric": "acuracy"})
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert "'accuracy'" in error.hint
    assert not losses(run)


def test_the_shared_loss_is_a_sum_over_samples() -> None:
    logits, targets = torch.randn(7, 4), torch.randint(0, 4, (7,))
    one_by_one = sum(loss_sum(logits[i : i + 1], targets[i : i + 1]) for i in range(7))
    torch.testing.assert_close(loss_sum(logits, targets), one_by_one)


@pytest.mark.parametrize("options", [{"batch": 89}, {"batch": 30, "micro_batch": 29}, {"batch": 1}])
def test_batch_norm_of_somebodys_own_model_takes_a_single_sample(
    make_run: MakeRun, options: dict[str, int]
) -> None:
    run, data = make_run(epochs=1, **options), {"train": points(90), "test": points(5)}
    assert live(run.path, task=ObjectTask(model=network(), data=data)) is RunState.FINISHED


@pytest.mark.parametrize("options", [{"early_stopping": 2}, {"schedule": "plateau"}])
def test_what_watches_the_validation_data_is_refused_without_any(
    make_run: MakeRun, options: dict[str, Any]
) -> None:
    run = make_run(steps=2, **options)
    data = {"train": points(), "test": points(5)}
    assert live(run.path, task=ObjectTask(model=network(), data=data)) is RunState.FAILED
    assert "validation data" in events(run, ErrorRaised)[0].message


def test_a_model_without_weights_to_train_is_explained(make_run: MakeRun) -> None:
    run, model = make_run(steps=2), network().requires_grad_(False)
    assert live(run.path, task=ObjectTask(model=model, data=points())) is RunState.FAILED
    assert "any weight that can be trained" in events(run, ErrorRaised)[0].message
