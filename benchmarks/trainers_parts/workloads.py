"""The three workloads: their sizes, and the data that is made once and read by every contender."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and for how long."""

    name: str
    title: str
    batch: int
    steps: int
    quick_steps: int
    warmup_steps: int
    """Steps at the start that are not timed."""
    samples: int
    lr: float

    def length(self, *, quick: bool) -> int:
        """Steps to train."""
        return self.quick_steps if quick else self.steps


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            name="mlp",
            title="overhead: a small MLP, about 2 ms a step",
            batch=64,
            steps=3000,
            quick_steps=1000,
            warmup_steps=100,
            samples=16_384,
            lr=1e-3,
        ),
        Workload(
            name="gpt",
            title="arithmetic: a GPT of 10M parameters, 8 × 256 tokens",
            batch=8,
            steps=14,
            quick_steps=7,
            warmup_steps=2,
            samples=256,
            lr=3e-4,
        ),
        Workload(
            name="text",
            title="variable length: a BERT-like classifier, batch 8",
            batch=8,
            steps=240,
            quick_steps=120,
            warmup_steps=10,
            samples=3000,
            lr=3e-4,
        ),
    )
}

MLP_INPUTS, MLP_WIDTH, MLP_CLASSES = 64, 288, 10
GPT_TOKENS, GPT_LENGTH = 256, 256
TEXT_WORDS, TEXT_LONGEST, TEXT_CLASSES = 2000, 256, 4


def make_data(directory: Path, *, quick: bool) -> None:
    """Write the data of every workload, and the order in which its samples are visited."""
    for name in ("mlp", "gpt"):
        make_arrays(directory, name, steps=WORKLOADS[name].length(quick=quick))
    lines = [json.dumps({"text": text, "label": label}) for text, label in make_texts()]
    (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
    _save_bert(directory / "bert")


def make_arrays(directory: Path, workload: str, *, steps: int) -> None:
    """Inputs, targets, and the samples of each step one after another."""
    # The order is Yunlu's own, so that its run need not be told; the others take it as a sampler.
    from yunlu.training.data.sample_order import StepOrder  # noqa: PLC0415 (only the maker needs it)

    about = WORKLOADS[workload]
    order = StepOrder(samples=about.samples, batch=about.batch, seed=SEED).steps_from(0)
    inputs, targets = _points() if workload == "mlp" else _sequences()
    np.save(directory / f"{workload}-inputs.npy", inputs)
    np.save(directory / f"{workload}-targets.npy", targets)
    visits = np.concatenate([next(order) for _ in range(steps)])
    np.save(directory / f"{workload}-order.npy", visits)


def _points() -> tuple[np.ndarray, np.ndarray]:
    """Points and the nearest of ten centres, with some noise between them."""
    random = np.random.default_rng(SEED)
    centres = random.normal(size=(MLP_CLASSES, MLP_INPUTS))
    targets = random.integers(0, MLP_CLASSES, WORKLOADS["mlp"].samples)
    noise = random.normal(size=(len(targets), MLP_INPUTS)) * 2.0
    return (centres[targets] + noise).astype(np.float32), targets.astype(np.int64)


def _sequences() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of which each follows one of four others: there is something to learn."""
    random = np.random.default_rng(SEED)
    followers = random.integers(0, GPT_TOKENS, (GPT_TOKENS, 4))
    tokens = np.empty((WORKLOADS["gpt"].samples, GPT_LENGTH + 1), dtype=np.int64)
    tokens[:, 0] = random.integers(0, GPT_TOKENS, len(tokens))
    for place in range(GPT_LENGTH):
        choice = random.integers(0, 4, len(tokens))
        tokens[:, place + 1] = followers[tokens[:, place], choice]
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def make_texts() -> list[tuple[str, str]]:
    """Texts of words; a third of the words of a text belong to its label.

    Lengths are log-normal: mean about 61, 95th percentile about 153, cut at 256.
    """
    random = np.random.default_rng(SEED)
    count = WORKLOADS["text"].samples
    lengths = np.clip(random.lognormal(3.857, 0.713, count), 5, TEXT_LONGEST).astype(int)
    telling = TEXT_WORDS // (50 * TEXT_CLASSES)
    texts: list[tuple[str, str]] = []
    for length in lengths:
        label = int(random.integers(TEXT_CLASSES))
        words = random.integers(TEXT_CLASSES * telling, TEXT_WORDS, length)
        told = random.random(length) < 0.3
        words[told] = random.integers(label * telling, (label + 1) * telling, int(told.sum()))
        # The pooled first place stands for the whole text, as in BERT.
        texts.append((" ".join(["[CLS]", *(f"w{word}" for word in words[1:])]), f"label{label}"))
    return texts


def _save_bert(directory: Path) -> None:
    """A Hugging Face directory with random weights and a word-level tokenizer."""
    import torch  # noqa: PLC0415 (seconds to import; sizes are read without it)
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        BertConfig,
        BertForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {
        word: number
        for number, word in enumerate([*marks, *(f"w{index}" for index in range(TEXT_WORDS))])
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106 (not a password)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",  # noqa: S106
        unk_token="[UNK]",  # noqa: S106
        model_max_length=TEXT_LONGEST,
    )
    tokenizer.save_pretrained(directory)
    names = [f"label{index}" for index in range(TEXT_CLASSES)]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=TEXT_LONGEST,
        pad_token_id=0,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    torch.manual_seed(SEED)
    BertForSequenceClassification(config).save_pretrained(directory)
