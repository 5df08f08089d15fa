"""Rows of published or own measurements as queries to predict. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import YunluError
from yunlu.planning.models.arithmetic import columns_of, parameters
from yunlu.planning.predict.aliases import (
    cuts_sequence,
    network_of,
    precision_of,
    recompute_of,
    sharding_of,
    stack_of,
)
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.correction import correct
from yunlu.planning.predict.geometry import UnreadableRowError, number, read_shape
from yunlu.planning.predict.intervals import spread_factors
from yunlu.planning.predict.memory import fits, peak_memory, reported_memory
from yunlu.planning.predict.plausibility import check_figures
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE, Column, QueryBatch
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.hardware.catalog import Catalog
    from yunlu.hardware.device import DeviceModel
    from yunlu.planning.models.shape import ModelShape

    Row = Mapping[str, str]


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
