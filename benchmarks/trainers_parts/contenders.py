"""The same training, written as a user of each tool would write it.

Each function trains ``setup.model`` for ``setup.steps``. Yunlu's also returns its log, for it calls
the model before the first step, to measure, and may call it several times a step.
"""

# Each tool is imported where it is used: no contender pays for another's import.
# ruff: noqa: PLC0415

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.trainers_parts.setup import CLIP_NORM, LOG_EVERY, WEIGHT_DECAY, as_named
from benchmarks.trainers_parts.workloads import SEED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.trainers_parts.setup import Setup


def train_by_hand(setup: Setup) -> None:
    """The loop of every tutorial."""
    model, optimizer = setup.model, setup.optimizer()
    model.train()
    for step, (x, y) in enumerate(setup.loader(), start=1):
        loss = setup.loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            print(step, loss.item())  # noqa: T201 (into the contender's own log)


def train_bare(setup: Setup) -> None:
    """The same without a ``DataLoader`` and without a word: the least there can be."""
    model, optimizer = setup.model, setup.optimizer()
    inputs, targets = setup.dataset.inputs, setup.dataset.targets
    model.train()
    for chosen in torch.tensor(setup.order).split(setup.batch):
        loss = setup.loss(model(inputs[chosen]), targets[chosen])
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()


class _WithLoss(nn.Module):
    """A model in the form that HF Trainer expects: it answers with its loss."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model(x), labels)}


def train_with_hf(setup: Setup) -> None:
    """HF Trainer."""
    from transformers import Trainer, TrainingArguments

    class OrderedTrainer(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return setup.order

    pinned: dict[str, Any] = {
        "use_cpu": True,
        "optim": "adamw_torch_fused",
        "logging_steps": LOG_EVERY,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=setup.batch,
        max_steps=setup.steps,
        learning_rate=setup.lr,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        seed=SEED,
        **(pinned if setup.pinned else {}),
    )
    trainer = OrderedTrainer(
        model=_WithLoss(setup.model, setup.loss),
        args=arguments,
        train_dataset=setup.dataset,
        data_collator=as_named,
    )
    trainer.train()


def train_with_lightning(setup: Setup) -> None:
    """Lightning; by default it logs, shows, summarises and checkpoints."""
    import lightning  # pyright: ignore[reportMissingImports] - in .venv-bench only

    class Module(lightning.LightningModule):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.model = setup.model

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            x, y = batch
            loss = setup.loss(self.model(x), y)
            if not setup.pinned:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setup.optimizer()

    pinned: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": 32,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_steps=setup.steps,
        max_epochs=-1,
        gradient_clip_val=CLIP_NORM,
        default_root_dir=tempfile.mkdtemp(),
        **(pinned if setup.pinned else {}),
    )
    trainer.fit(Module(), setup.loader())


def train_with_accelerate(setup: Setup) -> None:
    """Accelerate: one's own loop through its objects."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="no") if setup.pinned else Accelerator()
    model, optimizer, loader = accelerator.prepare(setup.model, setup.optimizer(), setup.loader())
    model.train()
    for step, (x, y) in enumerate(loader, start=1):
        loss = setup.loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            accelerator.print(step, loss.item())


def train_with_yunlu(setup: Setup) -> dict[str, Any]:
    """Yunlu from Python; returns its log of steps and its plan."""
    import yunlu

    x, y = setup.dataset.inputs, setup.dataset.targets
    pinned: dict[str, Any] = {
        "precision": "fp32",
        "compile": False,
        "micro_batch": setup.batch,
        "threads": setup.threads,
        "workers": 0,
        "padding": "pad",
        "recompute": "none",
        "evaluate": "never",
        "checkpoint": {"every": setup.steps, "keep_best": 0},
        "deterministic": False,
    }
    run = yunlu.train(
        model=setup.model,
        # A part to validate on is named, so that all samples are trained on as everywhere else.
        data={"train": (x, y), "validation": (x[: setup.batch], y[: setup.batch])},
        loss=setup.loss,
        steps=setup.steps,
        batch=setup.batch,
        optimizer={
            "name": "adamw",
            "lr": setup.lr,
            "weight_decay": WEIGHT_DECAY,
            **({"kernel": "fused"} if setup.pinned else {}),
        },
        schedule={"name": "constant", "warmup": 0},
        clip=CLIP_NORM,
        seed=SEED,
        **(pinned if setup.pinned else {}),
    )
    return {
        "history": run.history(),
        "plan": run.plan.model_dump(mode="json") if run.plan else None,
    }


CONTENDERS: dict[str, Callable[[Setup], Any]] = {
    "hand": train_by_hand,
    "bare": train_bare,
    "hf": train_with_hf,
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
    "yunlu": train_with_yunlu,
}
