"""Rows of published or own measurements: model shapes, plausibility, queries to predict. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import YunluError
from yunlu.planning.models.known_models import find_model
from yunlu.planning.models.shape import Adapter, ModelShape, columns_of, parameters
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.intervals import correct, spread_factors
from yunlu.planning.predict.memory import fits, peak_memory, reported_memory
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE, Column, QueryBatch
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.hardware.catalog import Catalog, DeviceModel

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """Rows that can be predicted, as points, and why the others cannot."""

    points: QueryBatch
    index: np.ndarray[Any, np.dtype[np.int64]]
    """Row of each point."""
    cores: Column
    """Points' devices per device of the row: above 1 where a layout counts cores of a chip."""
    reasons: dict[int, str]
    """For rows without a point: what is missing."""


_SEQUENCE_STACKS = {"megatron-bridge", "torchtitan", "nanotron", "maxtext", "neuron"}
_WATTS = {"H100": 700.0, "H200": 700.0, "A100": 400.0, "B200": 1000.0}
_NODE_GIGABITS = {"vtrain_multi": 800.0, "internevo": 400.0}
"""Network of a node where a source documents it elsewhere than in its rows (configurations, tables)."""
_REPLICAS_OF_CORES = re.compile(r"\[(\d+)xNC\(DP\)\]")
"""Notation in Neuron's tables of a replica per core."""
_SAME_CHIP = {"H100-96GB": 0.803, "GB300": 0.786}
"""Achievable share of devices whose chip was measured on another board (H100, B300)."""
_STATE_BYTES = 16.0
"""Bytes per trained weight in mixed precision: weight, gradient and optimiser state."""
_STILL = 0.2
"""Share of its power that a device draws when idle."""
_GUESSED_SEQ = 4096.0
_TOKENS_OF_A_GUESSED_MICRO_BATCH = 8192.0


def predict_rows(rows: Iterable[Row], catalog: Catalog) -> list[dict[str, Any]]:
    """For each row: throughput and memory with 10-90 % intervals, or the reason why not."""
    every = list(rows)
    reading = read_rows(every, catalog, guess=True)
    answers: list[dict[str, Any]] = [
        {"row": position, "model": row.get("model") or "", "reason": reading.reasons.get(position)}
        for position, row in enumerate(every)
    ]
    points, cores = reading.points, reading.cores
    with np.errstate(all="ignore"):
        time = step_time(points)
        step_s = time.total_s * correct(points, time)
        memory = reported_memory(points)
        enough = fits(points, peak_memory(points))
        pace = points.batch * points.seq / (step_s * points.devices) * cores
    low, high = spread_factors(points)
    for index, position in enumerate(reading.index):
        answers[position] |= {
            "tokens_per_s_per_device": float(pace[index]),
            "tokens_per_s_per_device_p10": float(pace[index] * low[index]),
            "tokens_per_s_per_device_p90": float(pace[index] * high[index]),
            "step_time_s": float(step_s[index]),
            "peak_memory_bytes": float(memory.total[index] * cores[index]),
            "peak_memory_bytes_p10": float(memory.low[index] * cores[index]),
            "peak_memory_bytes_p90": float(memory.high[index] * cores[index]),
            # In the unit of the data: nanotron divides by 2^30, the others by 10^9.
            "peak_mem_gb": float(memory.total[index] * cores[index]) / _gigabyte(every[position]),
            "fits": bool(enough[index]),
            "stack": STACKS[int(points.stack[index])],
        }
        if number(every[position], "seq_len") is None and points.seq[index] == _GUESSED_SEQ:
            answers[position]["assumed"] = f"seq_len {_GUESSED_SEQ:g}"
    return answers


def _gigabyte(row: Row) -> float:
    return 2.0**30 if stack_of(row) == "nanotron" else 1e9


def read_rows(rows: Sequence[Row], catalog: Catalog, *, guess: bool = False) -> ParsedRow:
    """Points of the rows, each on the catalog device of the row's name.

    With ``guess``, a length of sequences that is missing is taken to be a usual one.
    """
    reasons: dict[int, str] = {}
    records: list[dict[str, float]] = []
    index: list[int] = []
    for position, row in enumerate(rows):
        try:
            records.append(_read_row(row, catalog, guess=guess))
        except UnreadableRowError as missing:
            reasons[position] = str(missing)
        else:
            index.append(position)
    columns = {
        name: np.array([record.get(name, np.nan) for record in records], dtype=float)
        for name in QueryBatch.__dataclass_fields__
    }
    return ParsedRow(
        points=QueryBatch(**columns),
        index=np.array(index, dtype=np.int64),
        cores=np.array([record["cores"] for record in records], dtype=float),
        reasons=reasons,
    )


def measured_tokens_per_s(rows: Iterable[Row]) -> Column:
    """Tokens per second and device as measured; NaN where the row has none."""
    return np.array([_measured(row) for row in rows], dtype=float)


def _measured(row: Row) -> float:
    tokens = number(row, "tokens_per_s_per_gpu")
    if tokens is not None:
        return tokens
    step, batch = number(row, "step_time_s"), number(row, "global_batch")
    seq, gpus = number(row, "seq_len"), number(row, "gpus")
    if step and batch and seq and gpus:
        return batch * seq / step / gpus
    return float("nan")


def _read_row(row: Row, catalog: Catalog, *, guess: bool) -> dict[str, float]:
    check_figures(row)
    shape = read_shape(row)
    seq = number(row, "seq_len") or shape.tokens_per_sample or (_GUESSED_SEQ if guess else 0.0)
    if not seq:
        raise UnreadableRowError("seq_len is empty")
    device = _device(row, catalog)
    precision = _supported(precision_of(row.get("precision") or ""), device)
    again = recompute_of(row.get("act_ckpt") or "")
    split = _read_split(row, device, _devices_needed(shape, device))
    work = _read_work(row, split, seq)
    return {
        **columns_of(shape, int(seq)),
        **work,
        **split,
        **_hardware(device, precision, split["cores"], row),
        "seq": seq,
        # The smallest cluster that holds the states has no room for activations.
        "recompute": float(
            RECOMPUTE.index("full" if _is_guessed(row) and split["devices"] > 1 else "none")
            if again is None
            else again
        ),
        "precision": float(PRECISIONS.index(precision)),
        "stack": float(STACKS.index(stack_of(row))),
    }


def _device(row: Row, catalog: Catalog) -> DeviceModel:
    name = (row.get("gpu_type") or "").strip()
    if not name:
        raise UnreadableRowError("gpu_type is empty")
    try:
        return catalog.device(name)
    except YunluError as unknown:
        raise UnreadableRowError(f"gpu_type {name!r} is not in the catalog") from unknown


def _devices_needed(shape: ModelShape, device: DeviceModel) -> float:
    """One device, or as many whole nodes as hold the training state."""
    state_bytes = _STATE_BYTES * float(parameters(shape))
    if shape.adapter is not None or state_bytes <= device.memory_bytes:
        return 1.0
    node = float(device.node_devices)
    return float(node * 2.0 ** np.ceil(np.log2(max(1.0, state_bytes / device.memory_bytes / node))))


def _read_split(row: Row, device: DeviceModel, needed: float) -> dict[str, float]:
    tp = number(row, "tp") or 1.0
    pp = number(row, "pp") or 1.0
    cp = number(row, "cp") or 1.0
    result = number(row, "dp")
    gpus = number(row, "gpus")
    devices = gpus or (needed if _is_guessed(row) else (result or 1.0) * tp * pp * cp)
    cp = _cut_by_need(row, devices) or cp
    rest = tp * pp * cp
    cores = 1.0
    if device.kind == "neuron" and result and result * rest > devices:
        # Neuron tables count cores in the layout and chips in the fleet.
        cores = result * rest / devices
        devices = result * rest
    elif match := _REPLICAS_OF_CORES.search(row.get("notes") or ""):
        cores = max(1.0, float(match.group(1)) / device.node_devices)
        devices *= cores
    if devices % rest:
        if devices > rest:
            raise UnreadableRowError(
                f"tp {tp:g} x pp {pp:g} x cp {cp:g} does not divide gpus {devices:g}"
            )
        devices = rest * (result or 1.0)
    replicas = devices / rest
    zero, sharded = _sharding(row, replicas, tp, device)
    virtual = number(row, "vp") or 1.0
    if "interleaved" in (row.get("notes") or ""):
        virtual = max(virtual, 2.0)
    return {
        "devices": devices,
        "cores": cores,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": number(row, "ep") or 1.0,
        "virtual": virtual if pp > 1 else 1.0,
        "dp": replicas / sharded,
        "fsdp": sharded,
        "zero": float(zero),
        "sequence": float(
            tp > 1
            and cuts_sequence(row.get("notes") or "", usual=stack_of(row) in _SEQUENCE_STACKS)
        ),
    }


def _is_guessed(row: Row) -> bool:
    """Whether neither the number of devices nor the layout is stated."""
    return not any(row.get(name) for name in ("gpus", "dp", "tp", "pp", "cp"))


def _cut_by_need(row: Row, devices: float) -> float | None:
    """Number of parts of a sequence where there are fewer sequences than devices."""
    batch = number(row, "global_batch")
    if any(row.get(name) for name in ("dp", "tp", "pp", "cp")) or not batch or batch >= devices:
        return None
    return devices / batch if devices % batch == 0 else None


def _sharding(row: Row, replicas: float, tp: float, device: DeviceModel) -> tuple[int, float]:
    """ZeRO stage, and the number of shards (1 unless fully sharded)."""
    given = sharding_of(row.get("sharding") or "")
    if given is None and _REPLICAS_OF_CORES.search(row.get("notes") or ""):
        given = (0, "")
    if given is None:
        layout_is_told = any(row.get(name) for name in ("dp", "tp", "pp"))
        given = (1 if layout_is_told and device.kind != "tpu" else 3, "")
    zero, where = given
    if zero < 3:
        return zero, 1.0
    inside = max(1.0, min(replicas, device.node_devices / tp))
    return 3, inside if where == "node" and replicas % inside == 0 else replicas


def _read_work(row: Row, split: Mapping[str, float], seq: float) -> dict[str, float]:
    replicas = split["dp"] * split["fsdp"]
    batch = number(row, "global_batch")
    micro = number(row, "micro_batch")
    if micro is None:
        fair = (batch or replicas) / replicas
        # Under a pipeline the least is most often the fastest (Hagemann et al. 2023).
        most = 1.0 if split["pp"] > 1 else np.floor(_TOKENS_OF_A_GUESSED_MICRO_BATCH / seq)
        micro = max(1.0, min(fair, most))
    if "pipeline batch" in (row.get("notes") or "") and split["pp"] > 1:
        micro = max(1.0, micro / (split["pp"] * split["virtual"]))
    return {"batch": batch or micro * replicas, "micro_batch": micro}


def _hardware(device: DeviceModel, precision: str, cores: float, row: Row) -> dict[str, float]:
    # Neuron's compiler casts products of FP32 to 16 bits unless told not to.
    cast = device.kind == "neuron" and precision == "fp32"
    in_products = "bf16" if cast else precision
    peak = device.peak_flops.get(in_products) or _nearest_peak(device, in_products)
    network = device.network_bytes_per_s or 12.5e9
    link = device.link_bytes_per_s or network
    result = _stated_network(row)
    if result is not None:
        network = result / device.node_devices
    return {
        "peak_flops": peak * _power_share(row) / cores,
        "memory_bytes": device.memory_bytes / cores,
        "memory_bytes_per_s": device.memory_bytes_per_s / cores,
        "link_bytes_per_s": link / cores,
        "node_devices": device.fabric_devices * cores,
        "network_bytes_per_s": network / cores,
        "reachable": device.reachable or _SAME_CHIP.get(device.name, float("nan")),
    }


def _power_share(row: Row) -> float:
    """Share of the peak of a power-capped device such as ``H100-96GB-500W``.

    A part of the power is drawn even at rest; the rest grows at least as the square of the clock.
    """
    match = re.search(r"(\d{3,4})W\b", row.get("gpu_type") or "")
    if match is None:
        return 1.0
    usual = next((watts for name, watts in _WATTS.items() if name in row["gpu_type"]), None)
    if usual is None:
        return 1.0
    still = _STILL * usual
    return float(np.sqrt(np.clip((float(match.group(1)) - still) / (usual - still), 0.1, 1.0)))


def _stated_network(row: Row) -> float | None:
    """Bytes/s of a node's network where the row or its source's documentation says it."""
    gigabits = network_of(row.get("notes") or "", row.get("gpu_type") or "")
    gigabits = gigabits or _NODE_GIGABITS.get(row.get("source_id") or "")
    return gigabits / 8 * 1e9 if gigabits else None


def _supported(precision: str, device: DeviceModel) -> str:
    """The precision, or the next wider one that the device supports."""
    for fewer, wider in (("fp4", "fp8"), ("fp8", "bf16")):
        if precision == fewer and fewer not in device.peak_flops:
            precision = wider
    return precision


def _nearest_peak(device: DeviceModel, precision: str) -> float:
    for other in ("bf16", "fp16", "tf32", "fp32"):
        if device.peak_flops.get(other):
            return device.peak_flops[other]
    raise UnreadableRowError(f"no peak FLOP/s is known for precision {precision!r}")
