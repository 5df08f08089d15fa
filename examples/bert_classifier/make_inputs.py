"""Make what the example reads: train.txt, validation.txt, and a small BERT with random weights in bert/.

Nothing is downloaded. The sentences are those of Yunlu's synthetic reviews that praise or complain
without a negation, as lines of `label<TAB>sentence`: a network this small learns them in three epochs.
Run it in this folder, or name one: `python make_inputs.py FOLDER`.
"""

import re
import sys
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from yunlu.training.data.synthetic import generate_reviews

TRAINING, VALIDATION = 1200, 200
NEGATIONS = {"not", "nobody", "nothing", "anything", "but", "yet", "still"}


def main(folder: Path) -> None:
    table = generate_reviews(seed=0)
    pairs = zip(table["label"], table["text"], strict=True)
    lines = [
        f"{label}\t{text}"
        for label, text in pairs
        if label != "neutral" and NEGATIONS.isdisjoint(re.findall(r"\w+", text))
    ]
    assert len(lines) >= TRAINING + VALIDATION
    (folder / "train.txt").write_text("\n".join(lines[:TRAINING]) + "\n")
    held_out = lines[TRAINING : TRAINING + VALIDATION]
    (folder / "validation.txt").write_text("\n".join(held_out) + "\n")

    words = BertWordPieceTokenizer()
    words.train_from_iterator([line.partition("\t")[2] for line in lines[:TRAINING]], 400)
    (folder / "bert").mkdir(exist_ok=True)
    words.save_model(str(folder / "bert"))
    tokenizer = BertTokenizerFast(str(folder / "bert" / "vocab.txt"), model_max_length=128)
    tokenizer.save_pretrained(folder / "bert")

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "bert")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
