"""Hugging Face directories of a few kilobytes, with random weights and a tokenizer of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from yunlu.training.data.tokenizer import BpeTokenizer

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ["the lamp is good", "the lamp is bad", "3 May 2021", "2021-05-03"] * 4
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def save_tokenizer(directory: Path, *, longest: int = 64) -> int:
    """Write a small tokenizer; returns how many tokens it has."""
    directory.mkdir(parents=True, exist_ok=True)
    inner = BpeTokenizer(WORDS, vocabulary=300)
    inner.save(directory)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=longest,
    )
    fast.save_pretrained(str(directory))
    return inner.size


def save_bert(directory: Path, *, labels: int = 2, **changes: Any) -> Path:
    """An encoder with a head for labels."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=save_tokenizer(directory),
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=0,
        **{**sizes, **changes},
    )
    return _save(transformers.BertForSequenceClassification, config, directory)


def save_gpt2(directory: Path) -> Path:
    """A causal language model."""
    size = save_tokenizer(directory)
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=48, n_embd=16, n_layer=1, n_head=2, **MARKS
    )
    return _save(transformers.GPT2LMHeadModel, config, directory)


def save_t5(directory: Path) -> Path:
    """An encoder and a decoder."""
    config = transformers.T5Config(
        vocab_size=save_tokenizer(directory),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    return _save(transformers.T5ForConditionalGeneration, config, directory)


def _save(kind: Any, config: Any, directory: Path) -> Path:
    torch.manual_seed(0)
    kind(config).save_pretrained(directory)
    return directory
