"""Plausibility checks of measured rows. Pure."""

from __future__ import annotations

from math import inf, isfinite, prod
from typing import TYPE_CHECKING

from yunlu.planning.predict.geometry import UnreadableRowError, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    Row = Mapping[str, str]

_MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_WORK = ("seq_len", "global_batch", "micro_batch")
_LAYOUT = ("gpus", "dp", "tp", "pp", "cp", "ep", "vp")
_NOTHING = {"", "-", "nan", "na", "n/a", "none", "null"}
"""Notations of an empty field."""
COLUMNS = ("model", "params", *_MODEL, "tied", "moe", *_WORK, "gpu_type", "precision", *_LAYOUT,
           "sharding", "act_ckpt")  # fmt: skip
"""Columns used to predict a row, besides its source and notes."""


def check_figures(row: Row) -> None:
    """Refuse a row with invalid counts, or a batch that cannot be split."""
    for name in ("params", *_MODEL, *_WORK, *_LAYOUT):
        _check_count(name, (row.get(name) or "").strip())
    batch = number(row, "global_batch")
    result = {name: number(row, name) for name in ("dp", "micro_batch")}
    if "pipeline batch" in (row.get("notes") or ""):
        result.pop("micro_batch")  # it is then of all stages together
    parts = {name: value for name, value in result.items() if value is not None}
    if batch is not None and batch < prod(parts.values()):
        text = " x ".join(f"{name} {value:g}" for name, value in parts.items())
        raise UnreadableRowError(f"global_batch {batch:g} is below {text}")


def _check_count(name: str, text: str) -> None:
    if text.lower() in _NOTHING:
        return
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not isfinite(value):
        raise UnreadableRowError(f"{name} {text!r} is not a number")
    if value <= 0:
        raise UnreadableRowError(f"{name} {text} is not above 0")
    if value % 1 and name != "params":
        raise UnreadableRowError(f"{name} {text} is not a whole number")
