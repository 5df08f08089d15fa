"""Hyperparameter transfer: published scaling laws for learning rate and batch. Pure.

A rule has exponents and intercepts. The exponents hold over models and data; the intercepts depend on
tokenizer, data and architecture, and a few cheap runs of a small model find them (``fit_shift``). Batches
are in tokens, differences of rates and batches in octaves: one octave is a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.units import show_count
from yunlu.spec.task_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from yunlu.spec.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferScale:
    """Size of a training."""

    parameters: float
    """All weights but embeddings and head; of a mixture of experts, inactive experts included."""
    tokens: float
    """Training tokens, repetitions included."""

    @property
    def flops(self) -> float:
        """Six for each weight and token (Kaplan et al. 2020, section 2.1)."""
        return 6.0 * self.parameters * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RateAndBatch:
    """Learning rate and batch."""

    lr: float
    batch_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Offset of the best rate and batch on this data from a rule's, in octaves."""

    lr: float = 0.0
    batch: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Result of a small run."""

    scale: TransferScale
    setting: RateAndBatch
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A published rule, and its range of validity."""

    name: str
    source: str
    lr: Callable[[TransferScale], float]
    batch_tokens: Callable[[TransferScale], float]
    why_not: Callable[[TransferScale], str]
    """Why it does not cover a scale; empty where it does."""

    def at(self, scale: TransferScale, shift: Shift | None = None) -> RateAndBatch:
        """Rate and batch for a scale, shifted by the small runs."""
        moved = shift or Shift()
        return RateAndBatch(
            lr=self.lr(scale) * 2.0**moved.lr,
            batch_tokens=self.batch_tokens(scale) * 2.0**moved.batch,
        )

    def with_batch(
        self, scale: TransferScale, batch_tokens: float, shift: Shift | None = None
    ) -> RateAndBatch:
        """The rate for a given batch."""
        best = self.at(scale, shift)
        factor = (batch_tokens / best.batch_tokens) ** _OTHER_BATCH
        return RateAndBatch(lr=best.lr * factor, batch_tokens=batch_tokens)


_OTHER_BATCH = 0.3
"""The best rate at another batch than the best one goes with this power of it: on Step Law's trainings
0.2 for dense models and 0.4 for mixtures of experts, in the median."""
_REACH = 4.0
"""Factor beyond its fitted range up to which a rule is used."""


def _why_not_step_law(scale: TransferScale) -> str:
    within = 2e8 / _REACH <= scale.parameters <= 1.1e9 * _REACH
    if within and 4e9 / _REACH <= scale.tokens <= 1e11 * _REACH:
        return ""
    return "it was fitted on models of 0.2 to 1.1 G weights and 4 to 100 G tokens"


def _why_not_deepseek(scale: TransferScale) -> str:
    # By compute alone: weights and tokens have to be about in balance.
    if 1e17 <= scale.flops <= 1e25 and 5 <= scale.tokens / scale.parameters <= 400:
        return ""
    return "it was fitted on balanced trainings of 1e17 floating-point operations and more"


STEP_LAW = Rule(
    name="Step Law",
    source="Li et al. 2025, arXiv 2503.04715",
    lr=lambda scale: 1.79 * scale.parameters**-0.713 * scale.tokens**0.307,
    batch_tokens=lambda scale: 0.58 * scale.tokens**0.571,
    why_not=_why_not_step_law,
)
"""3,700 trainings; AdamW, a cosine down to 1e-5, sequences of 2,048 tokens."""

DEEPSEEK = Rule(
    name="DeepSeek's law",
    source="DeepSeek-AI 2024, arXiv 2401.02954, section 3.1",
    lr=lambda scale: 0.3118 * scale.flops**-0.1250,
    batch_tokens=lambda scale: 0.2920 * scale.flops**0.3271,
    why_not=_why_not_deepseek,
)
"""For balanced trainings; chosen beyond what Step Law was fitted on."""

RULES = (STEP_LAW, DEEPSEEK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Recommendation of a rule, and why."""

    setting: RateAndBatch
    rule: Rule
    reason: str


def advise(job: Job, scale: TransferScale, *, batch_tokens: float | None = None) -> Advice | None:
    """The published rate and batch for a job; None where no rule covers it.

    With ``batch_tokens``, the rate for this batch.
    """
    if why_no_rule(job):
        return None
    for rule in RULES:
        if not rule.why_not(scale):
            best = rule.at(scale)
            chosen = best
            sizes = f"{show_count(scale.parameters)} weights, {show_count(scale.tokens)} tokens"
            reason = f"{rule.name} for {sizes}"
            if batch_tokens is not None:
                chosen = rule.with_batch(scale, batch_tokens)
                ideal = show_count(best.batch_tokens)
                reason += f", batches of {show_count(batch_tokens)} (best: {ideal})"
            return Advice(setting=chosen, rule=rule, reason=f"{reason} ({rule.source})")
    return None


def why_no_rule(job: Job) -> str:
    """Why no rule covers a job of any size; empty where one does."""
    model, optimizer = job.model, job.train.optimizer
    if traits_of(job.task).transformer != "causal":
        return f"the rules are of language models, not of {job.task}"
    is_hf = model.name.startswith("hf:")
    if model.weights is not None or model.adapter is not None or (is_hf and model.pretrained):
        return "the rules are of training from scratch"
    if not is_hf and model.name != "transformer":
        return f"the rules are of transformers, and {model.name} may be anything"
    if not optimizer.traits.has_rate_laws:
        return f"the rules are of Adam, not of {optimizer.name}"
    if "mup_base" in model.args:
        return "under model.args.mup_base the rate is that of the base width"
    return ""


_NEAR = 0.02
"""Runs this much worse than the best of their scale are left out of the fit."""
_CURVATURE = (0.8, 0.6, -0.2)
"""Of the loss in per cent, per octave of the rate squared, of the batch, of both: what Step Law's
trainings have, within a factor of two."""
_TRUST = 3.0
"""Weight of that prior against the runs."""
_LEAST_CURVATURE = 0.05
_BEYOND = 0.5
"""Octaves that the optimum may lie outside the tried range."""


def fit_shift(runs: Iterable[Observed], *, rule: Rule = STEP_LAW) -> Shift:
    """Fit the intercepts of a rule to small runs of one or several scales; its exponents stay.

    One bowl, the same in octaves around the rule for all scales, is laid through the losses
    (least squares, its curvature drawn to the usual one, so that a handful of runs is enough).
    """
    tried = [(run, _octaves(run, rule)) for run in runs]
    if not tried:
        return Shift()
    ground = _ground(tried)
    places = np.array([index for _, index in tried])
    low, high = places.min(axis=0) - _BEYOND, places.max(axis=0) + _BEYOND
    lr, batch = np.clip(ground, low, high).tolist()
    return Shift(lr=lr, batch=batch)


def _octaves(run: Observed, rule: Rule) -> tuple[float, float]:
    result = rule.at(run.scale)
    return (
        math.log2(run.setting.lr / result.lr),
        math.log2(run.setting.batch_tokens / result.batch_tokens),
    )


def _ground(tried: Sequence[tuple[Observed, tuple[float, float]]]) -> np.ndarray:
    best: dict[TransferScale, float] = {}
    for run, _ in tried:
        best[run.scale] = min(run.loss, best.get(run.scale, math.inf))
    levels = {scale: number for number, scale in enumerate(best)}
    rows: list[list[float]] = []
    losses: list[float] = []
    for run, (x, y) in tried:
        above = math.log(run.loss / best[run.scale]) if math.isfinite(run.loss) else math.inf
        if above > _NEAR:
            continue
        level = [float(levels[run.scale] == number) for number in range(len(levels))]
        rows.append([*level, x, y, x * x / 2, y * y / 2, x * y])
        losses.append(100 * above)
    for index, (usual, trust) in enumerate(
        [(0.0, 0.02), (0.0, 0.02), *((curvature, _TRUST) for curvature in _CURVATURE)]
    ):
        row = [0.0] * (len(levels) + 5)
        row[len(levels) + index] = trust
        rows.append(row)
        losses.append(trust * usual)
    result = np.linalg.lstsq(np.array(rows), np.array(losses), rcond=None)[0][len(levels) :]
    slope, (xx, yy, xy) = result[:2], result[2:]
    bowl = np.array([[xx, xy], [xy, yy]])
    if np.linalg.eigvalsh(bowl)[0] < _LEAST_CURVATURE:  # a saddle: each axis by itself
        bowl = np.diag([max(xx, _CURVATURE[0] / 4), max(yy, _CURVATURE[1] / 4)])
    return -np.linalg.solve(bowl, slope)
