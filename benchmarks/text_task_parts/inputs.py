"""Real texts that are installed already: which package does a docstring come from? And a small BERT."""

from __future__ import annotations

import ast
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("numpy", "scipy", "sklearn", "torch")
PER_PACKAGE, HELD_OUT = 900, 100
_NAMES = re.compile(
    r"\b(numpy|np|scipy|sklearn|scikit-learn|torch|pytorch|tensor\w*)\b", re.IGNORECASE
)
_WORDS, _LONGEST = 40, 64


def make_inputs(folder: Path) -> None:
    """Write ``train.tsv`` and ``validation.tsv`` (``label<TAB>text``) and the directory ``bert``."""
    rows: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for package in PACKAGES:
        texts = sorted(set(_docstrings(package)))
        random.Random(0).shuffle(texts)  # noqa: S311 - an order, no secret
        texts = texts[:PER_PACKAGE]
        held_out += [(package, text) for text in texts[:HELD_OUT]]
        rows += [(package, text) for text in texts[HELD_OUT:]]
    random.Random(1).shuffle(rows)  # noqa: S311
    for name, part in (("train", rows), ("validation", held_out)):
        lines = "".join(f"{label}\t{text}\n" for label, text in [("label", "text"), *part])
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    _make_bert(folder / "bert", [text for _, text in rows])


def _docstrings(package: str) -> Iterator[str]:
    """First words of the docstrings of a package's functions and classes; its own name is taken out."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        if "test" in str(path):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = _NAMES.sub("", ast.get_docstring(node) or "").replace('"', "'").split()
                if len(text) >= 12:
                    yield " ".join(text[:_WORDS])


def _make_bert(folder: Path, texts: list[str]) -> None:
    import torch  # noqa: PLC0415 (seconds to import)
    from tokenizers import BertWordPieceTokenizer  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        BertConfig,
        BertForSequenceClassification,
        BertTokenizerFast,
    )

    words = BertWordPieceTokenizer()
    words.train_from_iterator(texts, 4000)
    folder.mkdir(exist_ok=True)
    words.save_model(str(folder))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=_LONGEST)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=_LONGEST,
        num_labels=len(PACKAGES),
    )
    BertForSequenceClassification(config).save_pretrained(folder)
