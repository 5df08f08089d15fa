"""Builders of an engine's parts: wrapped model, optimiser, sample order, moving average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

from yunlu.planning.large_batch import phases_of
from yunlu.training.compiler import run_xla_steps
from yunlu.training.data.sample_order import PhasedOrder, make_order
from yunlu.training.memory.gradient_release import ReleasingOptimizer, release_gradients
from yunlu.training.optim.build import build_optimizer
from yunlu.training.single_worker import SingleModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.communication.communicator import Communicator
    from yunlu.training.single_worker import SingleCommunication, SingleWorld, WrappedModel


def wrap_model(
    model: nn.Module, world: SingleWorld, communicator: Communicator | SingleCommunication
) -> WrappedModel:
    """Distribute a model over the workers; a single worker imports no parallel code."""
    if communicator.is_local_update and communicator.allreducer is not None:
        from yunlu.training.parallel.site_replicas import SiteReplicas  # noqa: PLC0415 - as below

        return SiteReplicas(model, communicator.allreducer, bucket_bytes=communicator.bucket_bytes)
    if world.layout.is_single or communicator.is_local_update:
        return SingleModel(model)
    from yunlu.training.parallel.parallel_model import ParallelModel  # noqa: PLC0415 - slow to import
    from yunlu.training.parallel.world import World  # noqa: PLC0415 - as above

    assert isinstance(world, World)
    return ParallelModel(
        model, world, communicator.allreducer, bucket_bytes=communicator.bucket_bytes
    )


def average_buffers(world: SingleWorld, model: nn.Module, average: AveragedModel | None) -> None:
    """Average buffers and the moving average over all workers: each updates its own copy."""
    averaged = [] if average is None else average.module.state_dict().values()
    world.average([*model.buffers(), *averaged])


def seed_step(seed: int, step: int, replica: int, device: torch.device) -> None:
    """Seed a worker's random numbers for a step; workers of one replica share a seed.

    Not with ``torch.manual_seed``: it queues a call with a formatted stack trace for every device
    type that is not initialised, and never drops them.
    """
    states = np.random.SeedSequence((seed, step, replica)).generate_state(1, np.uint64)
    step_seed = int(states[0] >> 1)
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(step_seed)


def make_optimizer(
    job: Job, plan: Plan, model: nn.Module, weights: Sequence[Tensor]
) -> tuple[Any, ReleasingOptimizer | None]:
    """The optimiser over the weights this worker updates; also as gradient release, if enabled."""
    train = job.train

    def build(trained: nn.Module | Sequence[Tensor]) -> Any:
        return build_optimizer(
            trained,
            train.optimizer,
            lr=plan.lr,
            weight_decay=plan.weight_decay,
            l2=train.l2,
            kernel=plan.kernel,
            freezable=job.communication.kept != "exact",
        )

    if not train.gradient_release:
        optimizer = build(weights)
        if plan.compile == "xla":
            run_xla_steps(optimizer)
        return optimizer, None
    release = release_gradients(model, build, l1=train.l1, clip_value=train.clip.value)
    return release, release


def make_sample_order(job: Job, plan: Plan, lengths: Any, *, samples: int) -> PhasedOrder:
    """Sample order of all steps, over all phases of a growing batch."""
    epochs = plan.steps  # an upper bound: no phase is cut off
    phases = phases_of(job.train.grow_batch, plan.batch, samples, epochs)
    return PhasedOrder(
        tuple(
            (
                first,
                make_order(samples, batch, job.train.seed, lengths=lengths, padding=plan.padding),
            )
            for first, batch in phases
        )
    )


def make_average(model: nn.Module, decay: float) -> AveragedModel:
    """A moving average of a model's weights."""

    def blend(averages: Any, current: Any, count: Any) -> None:
        # Early on the average follows closely, so that short runs do not end near the start.
        updates = int(count)
        weight = 1 - min(decay, (1 + updates) / (10 + updates))
        for average, value in zip(averages, current, strict=True):
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.copy_(value)

    with torch.no_grad():
        return AveragedModel(model, multi_avg_fn=blend, use_buffers=True)
