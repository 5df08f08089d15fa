"""The planner's memory formulas beside rehearsals: of the engine's own figures, and of the wide search."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.rehearsal_parts.cases import Case
from yunlu.core.units import show_bytes
from yunlu.planning.layouts import Layout, SplitConstraints, peak_parts, worker_share
from yunlu.planning.models.known_models import own_transformer
from yunlu.planning.models.shape import ModelShape, columns_of, parameters
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.memory import StateBytes, peak_memory
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE, make_queries
from yunlu.training.models.transformer import CausalTransformer
from yunlu.training.rehearsal import rehearse

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 32_000


class WideVocabulary(CausalTransformer):
    """Our transformer with the vocabulary of a large model, on text of bytes."""

    def __init__(self, vocabulary: int, max_length: int, **arguments: Any) -> None:
        del vocabulary
        super().__init__(vocabulary=VOCABULARY, max_length=max_length, **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A transformer, and the samples that it is trained on."""

    width: int
    layers: int
    heads: int
    length: int
    micro_batch: int

    @property
    def shape(self) -> ModelShape:
        """As the planner knows it."""
        return own_transformer(
            "causal", vocabulary=VOCABULARY, max_length=self.length, width=self.width,
            layers=self.layers, heads=self.heads, positions="rotary",
        )  # fmt: skip


MODELS = {
    "136M": SizedModel(width=1024, layers=8, heads=16, length=512, micro_batch=4),
    "535M": SizedModel(width=2048, layers=8, heads=16, length=1024, micro_batch=2),
    "1.9B": SizedModel(width=4096, layers=8, heads=32, length=2048, micro_batch=1),
}
_SEQUENCE: dict[str, Any] = {"sequence": True, "vocabulary": True}
POINTS: tuple[tuple[str, Layout, str, str, int], ...] = (
    ("136M", Layout(), "none", "fp32", 1),
    ("136M", Layout(), "none", "bf16", 1),
    ("535M", Layout(), "full", "bf16", 1),
    ("1.9B", Layout(), "selective", "bf16", 1),
    ("136M", Layout(), "none", "bf16", 2),
    ("136M", Layout(dp=8), "none", "bf16", 1),
    ("535M", Layout(dp=8), "full", "bf16", 1),
    ("535M", Layout(dp=8, zero1=True), "none", "bf16", 2),
    ("136M", Layout(fsdp=8), "none", "fp32", 1),
    ("535M", Layout(fsdp=8), "none", "bf16", 1),
    ("1.9B", Layout(fsdp=8), "full", "bf16", 2),
    ("1.9B", Layout(fsdp=64), "full", "bf16", 1),
    ("1.9B", Layout(fsdp=64), "selective", "bf16", 1),
    ("1.9B", Layout(dp=4, fsdp=8), "none", "bf16", 1),
    ("535M", Layout(tp=4, **_SEQUENCE), "none", "bf16", 1),
    ("1.9B", Layout(tp=8, **_SEQUENCE), "full", "bf16", 1),
    ("1.9B", Layout(tp=8, fsdp=8, **_SEQUENCE), "none", "bf16", 1),
    ("1.9B", Layout(tp=4, fsdp=16, **_SEQUENCE), "full", "bf16", 1),
    ("535M", Layout(pp=4), "none", "bf16", 8),
    ("1.9B", Layout(pp=4), "full", "bf16", 8),
    ("535M", Layout(pp=2, dp=2), "none", "bf16", 4),
    ("1.9B", Layout(pp=2, fsdp=4), "full", "bf16", 4),
)
"""Model, layout, recomputation, precision, micro-batches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaError:
    """Peak bytes of a point: rehearsed, and by both formulas."""

    model: str
    layout: str
    recompute: str
    precision: str
    micros: int
    rehearsed: float
    engine: float
    search: float
    parts: dict[str, int]
    engine_parts: dict[str, float]
    search_parts: dict[str, float]

    @property
    def engine_error(self) -> float:
        """Of the composition that plans for measured models use."""
        return self.engine / self.rehearsed - 1

    @property
    def search_error(self) -> float:
        """Of the fitted model that the wide search uses."""
        return self.search / self.rehearsed - 1

    def texts(self) -> tuple[str, ...]:
        """A row of the table."""
        figures = (self.engine, self.engine_error), (self.search, self.search_error)
        shown = [text for value, error in figures for text in (show_bytes(value), f"{error:+.1%}")]
        micros = f"{self.layout}, {self.micros} passes" if self.micros > 1 else self.layout
        return (
            self.model,
            micros,
            self.recompute,
            self.precision,
            show_bytes(self.rehearsed),
            *shown,
        )

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def judge() -> Iterator[FormulaError]:
    """Every point; libraries and the process count in neither figure."""
    for name, layout, recompute, precision, micros in POINTS:
        model = MODELS[name]
        case = _case(model, layout, recompute, precision, micros)
        ranks = rehearse(case.job, case.plan("cuda")).ranks
        worst = max(ranks, key=lambda rank: rank.peak_bytes)
        engine = _by_engine(name, case, recompute, precision)
        search = _by_search(model, case, recompute, precision)
        yield FormulaError(
            model=name, layout=str(layout), recompute=recompute, precision=precision, micros=micros,
            rehearsed=worst.peak_bytes, engine=sum(engine.values()), search=sum(search.values()),
            parts=worst.parts, engine_parts=engine, search_parts=search,
        )  # fmt: skip


def _case(
    model: SizedModel, layout: Layout, recompute: str, precision: str, micros: int, **more: Any
) -> Case:
    args = {"width": model.width, "layers": model.layers, "heads": model.heads}
    return Case(
        layout=layout, accumulation=micros,
        model={"name": f"{__name__}:WideVocabulary", "args": args | {"positions": "rotary"}},
        data={"max_length": model.length}, settings={"precision": precision, "recompute": recompute},
        **({"micro_batch": model.micro_batch} | more),
    )  # fmt: skip


@cache
def _bytes_per_sample(name: str, recompute: str, precision: str) -> float:
    """As the worker measures it: what a sample more takes, while the gradients are there."""
    peaks = [
        rehearse(case.job, case.plan("cuda")).peak_bytes
        for case in (
            _case(MODELS[name], Layout(dp=2), recompute, precision, 1, micro_batch=size)
            for size in (MODELS[name].micro_batch, 2 * MODELS[name].micro_batch)
        )
    ]
    return (peaks[1] - peaks[0]) / MODELS[name].micro_batch


def _by_engine(name: str, case: Case, recompute: str, precision: str) -> dict[str, float]:
    count = parameters(MODELS[name].shape)
    facts = SplitConstraints(
        parameters=count,
        trainable=count,
        state_bytes=8.0 * count,
        activation_bytes_per_sample=_bytes_per_sample(name, recompute, precision),
        layers=MODELS[name].layers,
    )
    share = worker_share(case.layout, batch=case.batch, micro_batch=case.micro_batch)
    return peak_parts(case.layout, facts, share, process_bytes=0.0)


def _by_search(model: SizedModel, case: Case, recompute: str, precision: str) -> dict[str, float]:
    layout = case.layout
    points = make_queries(
        1, **columns_of(model.shape, model.length), seq=model.length, batch=case.batch,
        micro_batch=case.micro_batch, devices=layout.world, dp=layout.dp, fsdp=layout.fsdp,
        zero=float(layout.zero1), tp=layout.tp, sequence=float(layout.sequence), pp=layout.pp,
        virtual=1, cp=1, ep=1, recompute=RECOMPUTE.index(recompute),
        precision=PRECISIONS.index(precision), peak_flops=3e14, memory_bytes=80e9,
        memory_bytes_per_s=2e12, link_bytes_per_s=3e11, node_devices=8, network_bytes_per_s=5e10,
        stack=STACKS.index("yunlu"),
    )  # fmt: skip
    peak = peak_memory(points, state=StateBytes(optimizer=8.0))
    names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    return {part: float(getattr(peak, part)[0]) for part in names}
