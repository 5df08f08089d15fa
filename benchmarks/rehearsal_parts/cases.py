"""Jobs and plans whose rehearsal is compared with the real step: one for every way to spend memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from yunlu.planning.layouts import Layout
from yunlu.planning.plan import Plan, Prediction
from yunlu.spec.job import Job

STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job under a plan."""

    layout: Layout = field(default_factory=Layout)
    micro_batch: int = 4
    accumulation: int = 1
    task: str = "language-modeling"
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the plan."""

    @property
    def job(self) -> Job:
        """The job."""
        return Job.model_validate(
            {
                "task": self.task,
                "model": _TRANSFORMER | self.model,
                "data": _TEXT | self.data,
                "train": {"batch": self.batch} | self.train,
                "devices": self.layout.world,
            }
        )

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.accumulation * self.layout.replicas

    def plan(self, device: str) -> Plan:
        """The plan, for a kind of device."""
        return Plan(
            device=device, threads=1, micro_batch=self.micro_batch, accumulation=self.accumulation,
            layout=self.layout, batch=self.batch, steps=STEPS, steps_per_epoch=STEPS,
            warmup_steps=0, lr=1e-3, weight_decay=0.01, evaluate_every=0, checkpoint_every=0,
            best_metric="loss", stopping_metric="loss", workers=0, choices=(),
            prediction=Prediction(
                memory_bytes=1, step_s=1, samples_per_s=1, total_s=1, dollars=None
            ),
            **({"kernel": "fused"} | self.settings),
        )  # fmt: skip


_TRANSFORMER: dict[str, Any] = {
    "name": "transformer",
    "args": {"width": 256, "layers": 4, "heads": 4},
}
_TEXT: dict[str, Any] = {"train": "synthetic:reviews", "max_length": 128, "tokenizer": "bytes"}
_DEEP: dict[str, Any] = {"args": _TRANSFORMER["args"] | {"layers": 10}}
_LORA: dict[str, Any] = {"adapter": {"rank": 8}}
_BF16: dict[str, Any] = {"precision": "bf16"}

CASES: dict[str, Case] = {
    "single": Case(),
    "single, accumulated, momentum": Case(
        accumulation=4, train={"optimizer": {"name": "momentum"}}, settings={"kernel": "foreach"}
    ),
    "single, bf16, full recompute": Case(settings=_BF16 | {"recompute": "full"}, micro_batch=8),
    "single, fp16, selective recompute": Case(
        settings={"precision": "fp16", "recompute": "selective"}, micro_batch=8
    ),
    "single, LoRA, bf16": Case(model=_LORA, settings=_BF16),
    "single, moving average, clipped": Case(
        train={"ema": 0.99, "clip": {"norm": 1.0}}, settings={"kernel": "single"}
    ),
    "dp2": Case(layout=Layout(dp=2)),
    "dp2, zero1, lamb": Case(
        layout=Layout(dp=2, zero1=True),
        train={"optimizer": {"name": "lamb"}},
        settings={"kernel": "single"},
    ),
    "fsdp4": Case(layout=Layout(fsdp=4)),
    "fsdp2, bf16, full recompute": Case(
        layout=Layout(fsdp=2), settings=_BF16 | {"recompute": "full"}, model=_DEEP
    ),
    "fsdp2, LoRA": Case(layout=Layout(fsdp=2), model=_LORA),
    "tp2": Case(layout=Layout(tp=2)),
    "tp2, sequence, vocabulary, bf16": Case(
        layout=Layout(tp=2, sequence=True, vocabulary=True), settings=_BF16
    ),
    "pp2": Case(layout=Layout(pp=2), accumulation=4, micro_batch=2),
    "pp2, bf16": Case(layout=Layout(pp=2), accumulation=4, micro_batch=2, settings=_BF16),
    "dp2 x fsdp2, accumulated": Case(layout=Layout(dp=2, fsdp=2), accumulation=2, micro_batch=2),
    "fsdp2 x tp2, selective recompute": Case(
        layout=Layout(fsdp=2, tp=2), settings={"recompute": "selective"}
    ),
    "pp2 x fsdp2, gpipe": Case(
        layout=Layout(pp=2, fsdp=2, schedule="gpipe"), accumulation=2, micro_batch=2
    ),
}
"""By what they are about."""

_LLAMA_70B: dict[str, Any] = {
    "model": {"args": {"width": 8192, "layers": 86, "heads": 64, "positions": "rotary"}},
    "data": {"max_length": 4096},
    "settings": _BF16 | {"recompute": "full"},
    "micro_batch": 1,
}
"""70 billion weights; its gated layers of three matrices count as two wider ones."""
LARGE: dict[str, Case] = {
    "fsdp": Case(layout=Layout(fsdp=512), **_LLAMA_70B),
    "tp x fsdp": Case(layout=Layout(fsdp=64, tp=8, sequence=True, vocabulary=True), **_LLAMA_70B),
}
"""What nobody here can run."""
