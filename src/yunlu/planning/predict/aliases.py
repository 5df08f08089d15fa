"""Aliases of software, precision, sharding, recomputation and networks in tables. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.geometry import UnreadableRowError
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    Row = Mapping[str, str]

_SOFTWARE = {
    "vtrain": "megatron-deepspeed",
    "llmfoundry": "llm-foundry",
    "megatronbridge": "megatron-bridge",
    "megatronhub": "megatron-bridge",
    "nemo": "megatron-bridge",
    "torchtitan": "torchtitan",
    "fmsfsdp": "fms-fsdp",
    "fmsacceleration": "transformers",
    "ascend": "mindspeed",
    "mindspeed": "mindspeed",
    "nanotron": "nanotron",
    "maxtext": "maxtext",
    "tpurecipes": "maxtext",
    "awsneuron": "neuron",
    "yunlu": "yunlu",
    # PyTorch 1.13 and flash-attention 1.0.5 when its tables were written.
    "internevo": "unknown-flash-1",
    "internlm": "unknown-flash-1",
    "gptneox": "megatron-deepspeed",
    "megatron": "megatron-deepspeed",
    "sc21": "megatron-deepspeed",
    "narayanan": "megatron-deepspeed",
    "korthikanti": "megatron-deepspeed",
}
"""Keywords in a source's name, and their software stack; the first match counts."""
_NOTHING = {"", "-", "nan", "na", "n/a", "none", "null"}
_NO = {"no", "off", "false", "0", "disabled", "disable", "never"}
_SHARDINGS = (
    (r"hsdp|hybridshard|^hybrid$", 3, "node"),
    (r"gradop", 2, ""),
    (r"fsdp|fullshard|zero\+\+", 3, ""),
    (r"dist(?:ributed)?opt|zero", 1, ""),
)
"""Sharding where no ZeRO stage is named; anything else shards nothing."""


def stack_of(row: Row) -> str:
    """Software stack of the row; ``unknown`` where it is not recognised."""
    result = (row.get("stack") or "").strip().lower().replace("_", "-")
    if result in STACKS:
        return result
    texts = (result, row.get("source_id") or "", row.get("source") or "")
    outcome = next((name for text in texts if (name := _software(text))), "unknown")
    if outcome.startswith("unknown"):
        return _by_kernel((row.get("notes") or "").lower()) or outcome
    fused = any(name in (row.get("gpu_type") or "") for name in ("H100", "H200", "B200", "B300"))
    # From the H100 on, Megatron uses the fused kernels of Transformer Engine.
    return "megatron-bridge" if outcome == "megatron-deepspeed" and fused else outcome


def _by_kernel(notes: str) -> str | None:
    """Unknown software: by the kernels in the row."""
    if re.search(r"flash.?att(?:ention|n).?2", notes):
        result = "unknown"
    elif re.search(r"flash.?att(?:ention|n)", notes):
        result = "unknown-flash-1"
    elif re.search(r"kernel ?[=:] ?(?:torch|fused|native)\b", notes):
        result = "unknown-scores"
    else:
        return None
    # A list of kernels without one for the norm means an unfused norm.
    lists = re.search(r"kernel ?[=:]", notes) and "rms" not in notes and "norm" not in notes
    return f"{result}-norms" if lists else result


def _software(text: str) -> str | None:
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    return next((name for key, name in _SOFTWARE.items() if key in letters), None)


def precision_of(text: str) -> str:
    """Name in ``PRECISIONS`` of a table's precision; default: bf16."""
    text = text.strip().lower()
    if "fp4" in text:
        return "fp4"
    if any(word in text for word in ("fp8", "float8", "e4m3", "e5m2")):
        return "fp8"
    if "bf" in text or text in _NOTHING | {"amp", "mixed"}:
        return "bf16"
    if "16" in text or "half" in text:
        return "fp16"
    if "tf32" in text:
        return "tf32"
    if "32" in text:
        return "fp32"
    raise UnreadableRowError(f"precision {text!r} is not one of {', '.join(PRECISIONS)}")


def recompute_of(text: str) -> int | None:
    """Index in ``RECOMPUTE`` of a table's recomputation; ``None`` where it is silent."""
    text = text.strip().lower()
    if text in _NOTHING - {"none"}:
        return None
    if text in _NO | {"none"} or text.startswith(("no ", "none", "without")):
        return RECOMPUTE.index("none")
    if re.search(r"sel|attn|attention|partial", text):
        return RECOMPUTE.index("selective")
    # Any other text means recomputation: every_layer, block, uniform, true.
    return RECOMPUTE.index("full")


def sharding_of(text: str) -> tuple[int, str] | None:
    """ZeRO stage of a table's sharding, and ``node`` where shards stay within a node."""
    letters = re.sub(r"[\s_-]+", "", text.lower())
    if letters in _NOTHING - {"none"}:
        return None
    if match := re.fullmatch(r"([0-3])|.*(?:zero|stage)([0-3]).*", letters):
        return int(match.group(1) or match.group(2)), ""
    for pattern, stage, where in _SHARDINGS:
        if re.search(pattern, letters):
            return stage, where
    return 0, ""


def cuts_sequence(notes: str, *, usual: bool) -> bool:
    """Sequence parallelism under tp: from the notes, else the default."""
    pattern = r"\b(?:sp *[=:]|sequence.?parallel\w*) *[=:]? *(true|false|on\b|off\b|1\b|0\b)?"
    match = re.search(pattern, notes.lower())
    if match is None:
        return usual
    return match.group(1) not in {"false", "off", "0"}


def network_of(notes: str, device: str) -> float | None:
    """Gbit/s of a node's network, from notes such as ``4 * 100Gb RoCE``."""
    kind = re.split(r"[-_ ]", device)[0]
    match = re.search(rf"(\d+) ?Gbps \({re.escape(kind)}\)", notes) if kind else None
    match = match or re.search(r"interconnect (\d+) ?Gbps per node", notes)
    if match:
        return float(match.group(1))
    cards = re.search(r"(\d+) ?[x*×] ?(\d+) ?G(?:b|bps|bit/s|b/s|bE)?\b", notes)
    return float(cards.group(1)) * float(cards.group(2)) if cards else None
