"""Schedule of local updates: when workers average their weights, and how the mean is applied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRules:
    """Interval, part size and outer step of local updates."""

    every: int = 8
    """Steps between two exchanges of a weight."""
    from_step: int = 0
    """Steps with gradients summed in every step at first (post-local SGD: Lin et al. 2020)."""
    delay: int = 0
    """Steps computed while an exchange is in flight (Wang et al. 2020, overlap local SGD)."""
    parts: int = 1
    """Parts of the model exchanged in turn (Douillard et al. 2025, streaming DiLoCo)."""
    codec: str = "none"
    """Codec of updates; residuals are added to the next."""
    outer_lr: float = 1.0
    """Outer learning rate."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer steps (Douillard et al. 2023, DiLoCo)."""

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.parts <= self.every:
            raise ValueError(f"every={self.every} and parts={self.parts}: 1 <= parts <= every")
        if not 0 <= self.delay <= self.every:
            raise ValueError(f"delay={self.delay}: an exchange ends before the next of its weights")
        if self.from_step < 0 or self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise ValueError(
                "from_step >= 0, outer_lr > 0 and 0 <= outer_momentum < 1 are expected"
            )

    def sums_gradients(self, step: int) -> bool:
        """Whether the gradients of this step, counted from 1, are summed over all workers."""
        return step <= self.from_step

    def parts_at(self, step: int) -> tuple[int, ...]:
        """Parts whose exchange starts after this step, counted from 1."""
        local_step = step - self.from_step
        if local_step < 1:
            return ()
        turn = local_step % self.every
        return tuple(part for part in range(self.parts) if part * self.every // self.parts == turn)


METHODS: dict[str, LocalRules] = {
    "local": LocalRules(),
    "post-local": LocalRules(from_step=100),
    "diloco": LocalRules(every=100, outer_lr=0.7, outer_momentum=0.9),
}
"""Defaults of the methods; a job may set each value."""
