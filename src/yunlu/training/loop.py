"""The inner loop: fetch, forward, backward, clip, step, log. Nothing else lives here."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.engine import Engine


class Watch(Protocol):
    """What looks on after every step: the log, evaluation, checkpoints, stopping."""

    def after_step(
        self, *, loss: Tensor, norm: Tensor, lr: float, items: int, data_s: float, compute_s: float
    ) -> bool:
        """Take one finished step; true ends the loop."""
        ...


def run(engine: Engine, watch: Watch) -> None:
    """Train until the plan's last step, or until the watch says stop."""
    engine.model.train()
    batches = engine.batches()
    while True:
        started_at = perf_counter()
        micros = next(batches, None)
        if micros is None:
            return
        fetched_at = perf_counter()
        loss = engine.accumulate(micros)
        norm = engine.clip()
        lr = engine.step()
        if watch.after_step(
            loss=loss,
            norm=norm,
            lr=lr,
            items=sum(micro.items for micro in micros),
            data_s=fetched_at - started_at,
            compute_s=perf_counter() - fetched_at,
        ):
            return
