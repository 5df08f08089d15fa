"""When workers that update weights of their own meet, and what they make of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRules:
    """How often to meet, with how much of the model at a time, and how the mean is applied."""

    every: int = 8
    """Steps from one exchange of a weight to its next."""
    from_step: int = 0
    """Until so many steps are done, gradients are summed in every step (post-local SGD: Lin et al. 2020)."""
    delay: int = 0
    """Steps computed while an exchange is under way (Wang et al. 2020, overlap local SGD)."""
    parts: int = 1
    """Parts of the model that take turns (Douillard et al. 2025, streaming DiLoCo)."""
    codec: str = "none"
    """How what a worker has learned is packed; what is left out goes with the next."""
    outer_lr: float = 1.0
    """How far to go along the mean of what the workers have learned."""
    outer_momentum: float = 0.0
    """Nesterov's, of the outer steps (Douillard et al. 2023, DiLoCo)."""

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
        """The parts whose exchange starts once this step, counted from 1, is done."""
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
"""What the methods' names stand for; a job may set each figure."""
