"""The variable-length text classifier: each tool as it comes, on the same texts and weights."""

# ruff: noqa: PLC0415 - each tool is imported where it is used

from __future__ import annotations

import json
import tempfile
from time import process_time
from typing import TYPE_CHECKING, Any

from benchmarks.trainers_parts.workloads import SEED, TEXT_LONGEST, WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT_DECAY = 0.01


def train_by_hand(directory: Path, steps: int) -> dict[str, Any]:
    """A loop with dynamic padding."""
    import torch
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

    samples, tokenizer = _tokenize(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "bert")
    workload = WORKLOADS["text"]
    torch.manual_seed(SEED)
    loader = DataLoader(
        samples,  # pyright: ignore[reportArgumentType] - a list is a map-style data set
        batch_size=workload.batch,
        shuffle=True,
        collate_fn=DataCollatorWithPadding(tokenizer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=WEIGHT_DECAY)
    model.train()
    for step, batch in enumerate(loader):
        if step == steps:
            break
        model(**batch).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {}


def train_with_hf(directory: Path, steps: int) -> dict[str, Any]:
    """HF Trainer with its defaults: dynamic padding, fp32."""
    from transformers import (
        AutoModelForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    samples, tokenizer = _tokenize(directory)
    workload = WORKLOADS["text"]
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(directory / "bert"),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=workload.batch,
            max_steps=steps,
            learning_rate=workload.lr,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="constant",
            seed=SEED,
        ),
        train_dataset=samples,  # pyright: ignore[reportArgumentType]
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    return {}


def train_with_yunlu(directory: Path, steps: int) -> dict[str, Any]:
    """A text-classification job; everything that may be ``auto`` is."""
    import yunlu

    workload = WORKLOADS["text"]
    run = yunlu.train(
        yunlu.Job.model_validate(
            {
                "name": "bench-text",
                "task": "text-classification",
                "model": f"hf:{directory / 'bert'}",
                # All texts are trained on, as everywhere else.
                "data": {
                    "train": str(directory / "text.jsonl"),
                    "split": {"validation": 0, "test": 0},
                },
                "train": {
                    "steps": steps,
                    "batch": workload.batch,
                    "optimizer": {"lr": workload.lr, "weight_decay": WEIGHT_DECAY},
                    "schedule": {"name": "constant", "warmup": 0},
                    "seed": SEED,
                },
            }
        ),
        wait=False,
    )
    launch_cpu_s = process_time()
    run.wait()
    waiting_cpu_s = process_time() - launch_cpu_s
    return {
        "history": run.history(),
        "launch_cpu_s": launch_cpu_s,
        "waiting_cpu_s": waiting_cpu_s,
        "plan": run.plan.model_dump(mode="json") if run.plan else None,
    }


CONTENDERS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "hand": train_by_hand,
    "hf": train_with_hf,
    "yunlu": train_with_yunlu,
}


def _tokenize(directory: Path) -> tuple[list[dict[str, Any]], Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "bert")
    rows = [json.loads(line) for line in (directory / "text.jsonl").read_text().splitlines()]
    texts = tokenizer(
        [row["text"] for row in rows],
        add_special_tokens=False,
        truncation=True,
        max_length=TEXT_LONGEST,
    )
    names = sorted({row["label"] for row in rows})
    samples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": names.index(row["label"])}
        for ids, row in zip(texts["input_ids"], rows, strict=True)
    ]
    return samples, tokenizer
