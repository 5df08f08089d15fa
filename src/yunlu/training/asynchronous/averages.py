"""Batch-norm running averages of a model whose weights come from servers, recomputed from training data.

Each worker's own averages cover its past weights; those of the current weights are
better (Wu and Johnson 2021, "Rethinking Batch in BatchNorm").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from yunlu.training.data.batches import step_batches
from yunlu.training.tasks.task import collate_for

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.engine import Engine

_SAMPLES = 2048
"""Approximate number of samples to average over."""


def recompute_averages(engine: Engine) -> None:
    """Recompute the running averages of batch norms for the current weights."""
    norms = _batch_norms(engine.model)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    was_training = engine.model.training
    engine.model.train()
    steps = min(max(_SAMPLES // engine.order.batch, 1), engine.order.steps_per_epoch)
    batches = step_batches(
        engine.splits.train,
        collate_for(engine.task, engine.plan.padding),
        engine.order,
        micro_batch=engine.micro_batch,
        first_step=0,
        steps=steps,
        workers=0,
        lengths=None if engine.plan.padding == "pack" else engine.lengths,
    )
    with torch.no_grad():
        for micros in batches:
            for micro in micros:
                with engine.precision.forward():
                    engine.task.loss(engine.model, micro.to(engine.device))
    engine.model.train(was_training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
