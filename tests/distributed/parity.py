"""A small task that breaks careless parallelism: uneven lengths, ignored targets, accumulation, clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.training_device import KIND
from yunlu.planning.layouts import Layout
from yunlu.planning.plan import Plan, Prediction
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.engine import Engine
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.tasks.scoring import IGNORED, loss_sum
from yunlu.training.tasks.task import Batch, Evaluation, Splits, TrainingInputs, call, logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest

VOCABULARY, SAMPLES, BATCH, STEPS = 32, 80, 32, 22


class Sentences:
    """The next token of sentences of 5 or 12 tokens; some targets are ignored."""

    metric = "loss"

    def __init__(self, make: str = "tied") -> None:
        self._make = make

    def load(self, job: Job) -> Splits:
        generator = torch.Generator().manual_seed(5)
        # Few lengths: DTensor plans every new shape anew, which takes longer than the arithmetic.
        lengths = [
            (5, 12)[n] for n in torch.randint(0, 2, (SAMPLES,), generator=generator).tolist()
        ]
        if self._make == "normed":  # padding would be part of the statistics, and is not the same
            lengths = [8] * SAMPLES
        samples = [
            torch.randint(0, VOCABULARY, (size + 1,), generator=generator) for size in lengths
        ]
        return Splits(train=samples, validation=None, test=None, fingerprint="sentences")

    def build(self, job: Job) -> nn.Module:
        torch.manual_seed(11)
        return MODELS[self._make]()

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        padded = nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=IGNORED)
        targets = padded[:, 1:].clone()
        targets[targets == 3] = IGNORED
        return Batch(
            inputs=(padded[:, :-1].clamp(min=0),),
            targets=targets,
            samples=len(samples),
            items=int((targets != IGNORED).sum()),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        logits = logits_of(call(model, batch))
        return loss_sum(logits, batch.targets), logits

    def scorer(self) -> Any:
        return NoScore()


class NoScore:
    """Only the loss counts here."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Nothing to add."""

    def result(self) -> Evaluation:
        """No metrics."""
        return Evaluation(metrics={})


def _transformer(*, tied: bool, layers: int = 4) -> nn.Module:
    return CausalTransformer(
        vocabulary=VOCABULARY, max_length=16, width=32, layers=layers, heads=4, tied=tied
    )


def _detached() -> nn.Module:
    """Tied, and only the last stage has a gradient for the weight."""
    model = _transformer(tied=True)
    embedding = model.get_submodule("embedding.token")
    embedding.register_forward_hook(lambda module, inputs, vectors: vectors.detach())
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


class Normed(nn.Module):
    """Batch normalisation in the middle: statistics must be those of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embedding(ids)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


MODELS: dict[str, Any] = {
    "tied": lambda: _transformer(tied=True),
    "untied": lambda: _transformer(tied=False),
    "uneven": lambda: _transformer(tied=False, layers=3),
    "detached": _detached,
    "llama": _llama,
    "normed": Normed,
}


@dataclass
class Recorder:
    """Keeps what every step came to."""

    losses: list[float]
    norms: list[float]

    def before_first_step(self) -> bool:
        return False

    def after_undone_step(self) -> None:
        raise AssertionError("nobody asks it to stop")

    def before_step(self) -> StepRequest:
        return ""

    def after_step(self, step: loop.Step) -> bool:
        self.losses.append(step.loss)
        self.norms.append(step.norm)
        return False


def make_job(**train: Any) -> Job:
    settings = {
        "steps": STEPS,
        "batch": BATCH,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "clip": 0.5,
        **train,
    }
    return Job.model_validate({"task": "t", "model": "m", "data": "d", "train": settings})


def make_plan(
    layout: Layout, job: Job, *, micro_batch: int, kernel: Any, device: str = KIND
) -> Plan:
    batch = job.train.batch
    assert isinstance(batch, int)
    return Plan(
        device=device,
        devices=layout.world,
        layout=layout,
        threads=1,
        micro_batch=micro_batch,
        kernel=kernel,
        batch=batch,
        accumulation=8,
        steps=STEPS,
        steps_per_epoch=-(-SAMPLES // batch),
        warmup_steps=3,
        lr=0.01,
        weight_decay=0.1,
        evaluate_every=0,
        checkpoint_every=100,
        best_metric="loss",
        stopping_metric="loss",
        workers=0,
        choices=(),
        prediction=Prediction(memory_bytes=0, step_s=1, samples_per_s=1, total_s=1, dollars=None),
    )


def train(world: World, make: str, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run; ``settings`` are the job's, and those of the plan."""
    asked = dict(settings)
    # Tensor parallel is slow on a CPU by the number of operations: fewer, larger ones.
    usual = 16 if world.layout.tp > 1 else 4
    kernel, micro_batch = asked.pop("kernel", "fused"), asked.pop("micro_batch", usual)
    job, task = make_job(**asked), Sentences(make)
    parts = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    device = world.device.type
    plan = make_plan(world.layout, job, micro_batch=micro_batch, kernel=kernel, device=device)
    engine = Engine(job, plan, parts, lambda *_, **__: None, world=world)
    recorder = Recorder([], [])
    loop.run(engine, recorder)
    engine.close()
    return recorder.losses, recorder.norms
