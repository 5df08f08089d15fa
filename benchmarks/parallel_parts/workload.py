"""The model, the job, and the batches that Yunlu will take: made once, read by the hand-written scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.faults_parts.workload import Workload, make_text

if TYPE_CHECKING:
    from pathlib import Path

WORKLOAD = Workload(width=384, layers=6, heads=6, length=64, batch=8, samples=2048)
MODEL_ARGS: dict[str, Any] = {**WORKLOAD.model_args(), "tied": False}
"""Not tied: a pipeline by hand would have to pass the embedding's gradient between its ends."""
WEIGHT_DECAY, CLIP_NORM = 0.01, 1.0
MICRO_BATCH = {"dp2": 4, "fsdp2": 4, "tp2": 8, "pp2": 2}
"""Samples per forward pass. Pipelines live of small ones."""
LAYOUTS = {
    "dp2": "two replicas; by hand: DDP",
    "fsdp2": "weights sharded in two; by hand: FSDP2",
    "tp2": "matrices cut in two; by hand: parallelize_module",
    "pp2": "two stages, 1F1B; by hand: torch.distributed.pipelining",
}


def make_job(directory: Path, layout: str, steps: int) -> dict[str, Any]:
    """All that can be equal to the hand-written script is; the log and its ways are Yunlu's."""
    return {
        "name": f"bench-{layout}",
        "task": "language-modeling",
        "model": {"name": "transformer", "args": MODEL_ARGS},
        "data": {
            "train": str(directory / "text.txt"),
            "tokenizer": "bytes",
            "max_length": WORKLOAD.length,
            "split": {"validation": 0.0, "test": 0.0},
        },
        "train": {
            "steps": steps,
            "batch": WORKLOAD.batch,
            "micro_batch": MICRO_BATCH[layout],
            "optimizer": {
                "name": "adamw",
                "lr": WORKLOAD.lr,
                "weight_decay": WEIGHT_DECAY,
                "kernel": "fused",
            },
            "schedule": {"name": "constant", "warmup": 0},
            "clip": CLIP_NORM,
            "precision": "fp32",
            "compile": False,
            "threads": 1,
            "workers": 0,
            "padding": "pad",
            "recompute": "none",
            "evaluate": "never",
            "checkpoint": {"every": steps, "keep_best": 0},
            "deterministic": False,
            "seed": 0,
        },
        "layout": layout,
    }


def make_data(directory: Path, steps: int) -> None:
    """The text; and as Yunlu reads it, the tokens of every step and the first weights."""
    # Imported here: whoever only measures does not wait for torch.
    from safetensors.torch import save_file  # noqa: PLC0415

    from yunlu.spec.job import Job  # noqa: PLC0415
    from yunlu.training.data.sample_order import StepOrder  # noqa: PLC0415
    from yunlu.training.determinism import seed_everything  # noqa: PLC0415
    from yunlu.training.tasks.task import open_task  # noqa: PLC0415

    make_text(directory / "text.txt", WORKLOAD)
    job = Job.model_validate(make_job(directory, "dp2", steps))
    task = open_task(job.task)
    splits = task.load(job)
    seed_everything(job.train.seed)
    model = task.build(job)
    save_file(model.state_dict(), directory / "weights.safetensors")
    count = len(splits.train)
    order = StepOrder(samples=count, batch=WORKLOAD.batch, seed=job.train.seed).steps_from(0)
    rows = [[splits.train[index][0] for index in next(order)] for _ in range(steps)]
    np.save(directory / "tokens.npy", np.array(rows, dtype=np.int64))
    vocabulary = len(model.state_dict()["head.weight"])
    sizes = {"vocabulary": vocabulary, "max_length": WORKLOAD.length, **MODEL_ARGS}
    (directory / "model.json").write_text(json.dumps(sizes))
