"""What comes out of a run can be used without Yunlu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Yunlu

SENTENCES = "\n".join(
    f"{label}\tthe {thing} was {word} indeed"
    for label, words in {
        "good": ("great", "lovely", "fine"),
        "bad": ("awful", "dull", "poor"),
    }.items()
    for word in words
    for thing in ("film", "book", "meal", "room", "trip", "song", "game", "play")
)


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = sorted(set(SENTENCES.replace("\t", " ").split()))
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path / "tiny-bert"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_a_fine_tuned_model_loads_in_transformers(
    tiny_bert: Path, tmp_path: Path, own_home: Path, yunlu: Yunlu
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    (tmp_path / "sentences.txt").write_text(SENTENCES)
    (tmp_path / "job.yaml").write_text(
        f"task: text-classification\nmodel: hf:{tiny_bert}\ndata: sentences.txt\n"
        "train: {epochs: 30, optimizer: {lr: 0.003}}\n"
    )
    answer = yunlu("train", "job.yaml", "--json")
    assert answer.code == 0, answer.err
    (directory,) = own_home.glob("job-*/model")
    model = AutoModelForSequenceClassification.from_pretrained(directory, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.id2label == {0: "bad", 1: "good"}
    with torch.no_grad():
        scores = model(**tokenizer(["the song was lovely", "the room was awful"],
                                   padding=True, return_tensors="pt",
                                   return_token_type_ids=False)).logits  # fmt: skip
    assert scores.argmax(dim=1).tolist() == [1, 0]


@pytest.mark.slow
def test_weights_come_out_in_full_precision_with_a_card(
    tmp_path: Path, own_home: Path, yunlu: Yunlu
) -> None:
    (tmp_path / "job.yaml").write_text(
        "task: tabular-classification\nmodel: mlp\ndata: sklearn:iris\n"
        "train: {epochs: 3, precision: bf16, ema: 0.9}\n"
    )
    answer = yunlu("train", "job.yaml", "--json")
    assert answer.code == 0, answer.err
    (directory,) = own_home.glob("job-*/model")
    weights = load_file(directory / "model.safetensors")
    assert {weight.dtype for weight in weights.values() if weight.is_floating_point()} == {
        torch.float32
    }
    card = (directory / "README.md").read_text()
    fingerprint = next(r["fingerprint"] for r in answer.records if r.get("event") == "data")
    accuracy = answer.scores("test")["accuracy"]
    assert fingerprint in card
    assert f"| test | accuracy | {accuracy:.4g} |" in card
    assert json.loads((directory / "job.json").read_text())["model"]["name"] == "mlp"
