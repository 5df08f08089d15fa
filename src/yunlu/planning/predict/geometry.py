"""Model shape of a row of measurements: from its columns, else from its name. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from yunlu.planning.models.arithmetic import parameters
from yunlu.planning.models.known_models import find_model
from yunlu.planning.models.shape import Adapter, ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    Row = Mapping[str, str]

_COMMON_VOCAB = 32000


class UnreadableRowError(ValueError):
    """A row is incomplete or contradictory; the text is the reason."""


def number(row: Row, name: str) -> float | None:
    """A field as a number; ``None`` where it is empty or not a number above zero."""
    try:
        value = float((row.get(name) or "").strip())
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def read_shape(row: Row) -> ModelShape:
    """Shape of the row's model; with an adapter where model or notes mention LoRA."""
    shape = _from_columns(row) or _from_name(row)
    if shape is None:
        missing = [name for name in ("layers", "hidden") if number(row, name) is None]
        name = row.get("model") or ""
        raise UnreadableRowError(
            f"{' and '.join(missing) or 'layers'} empty and model {name!r} is not a known one"
        )
    return shape.model_copy(update={"adapter": _adapter(row)}) if _adapter(row) else shape


def _from_columns(row: Row) -> ModelShape | None:
    layers, hidden = number(row, "layers"), number(row, "hidden")
    if layers is None or hidden is None or row.get("moe") in {"1", "True", "true"}:
        return None
    known = _from_name(row)
    if known is not None and (known.layers, known.hidden) == (layers, hidden):
        vocab = number(row, "vocab")
        return known.model_copy(update={"vocab": int(vocab)}) if vocab else known
    heads = number(row, "heads") or max(1.0, hidden // 128)
    plain = ModelShape(
        name=row.get("model") or "row",
        kind="decoder",
        layers=int(layers),
        hidden=int(hidden),
        heads=int(heads),
        kv_heads=int(number(row, "kv_heads") or heads),
        ffn=int(number(row, "ffn") or 4 * hidden),
        vocab=int(number(row, "vocab") or (known.vocab if known else 0) or _COMMON_VOCAB),
        tied=row.get("tied") in {"1", "True", "true"},
        causal="bert" not in (row.get("model") or "").lower(),
    )
    return _like_the_count(plain, row)


def _like_the_count(plain: ModelShape, row: Row) -> ModelShape:
    """Gated MLP and tied embedding chosen by the stated number of weights."""
    result = number(row, "params")
    guesses = [plain.model_copy(update={"gated": gated}) for gated in (False, True)]
    if result is None:
        return guesses[int(plain.ffn != 4 * plain.hidden)]
    if not row.get("tied"):
        guesses += [guess.model_copy(update={"tied": True}) for guess in guesses]
    if number(row, "vocab") is None:
        # The number may be of the blocks alone.
        bare = [guess.model_copy(update={"vocab": 0}) for guess in guesses]
        best = min(
            range(len(guesses)),
            key=lambda i: min(_miss(guesses[i], result), _miss(bare[i], result)),
        )
        return guesses[best]
    return min(guesses, key=lambda guess: _miss(guess, result))


def _miss(shape: ModelShape, expected: float) -> float:
    return abs(parameters(shape) - expected)


def _from_name(row: Row) -> ModelShape | None:
    """A known model by a name in a table, without surrounding words."""
    name = row.get("model") or ""
    bare = re.sub(
        r"(?i)pre-?training|fine-?tuning|maxtext|huggingface|lora|sft|ph[12]\b", " ", name
    )
    bare = re.sub(r"[\s_-]+", "-", re.sub(r"\(.*?\)", " ", bare).strip()).strip("-")
    return find_model(name) or find_model(bare)


def _adapter(row: Row) -> Adapter | None:
    text = f"{row.get('model') or ''} {row.get('notes') or ''}".lower()
    if "lora" not in text:
        return None
    rank = re.search(r"\br=(\d+)", text)
    quantised = "qlora" in text or "gptq" in text or "bnb" in text
    return Adapter(rank=int(rank.group(1)) if rank else 16, base="int4" if quantised else "bf16")
