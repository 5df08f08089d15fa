"""Rows of tables: read as far as they go, refused with a reason where they say too little."""

from __future__ import annotations

import pytest

from yunlu.hardware.catalog import load_catalog
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE
from yunlu.planning.predict.rows import (
    measured_tokens_per_s,
    predict_rows,
    read_rows,
)

CATALOG = load_catalog()
ROW = {
    "source_id": "vtrain_multi",
    "model": "gpt-h3072-L30",
    "params": "3551775744",
    "layers": "30",
    "hidden": "3072",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "12288",
    "vocab": "50257",
    "tied": "1",
    "seq_len": "2048",
    "global_batch": "512",
    "micro_batch": "8",
    "gpus": "64",
    "gpu_type": "A100-80GB-SXM",
    "precision": "fp16",
    "dp": "64",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "sharding": "zero0",
    "act_ckpt": "full",
}


def read(**changes: str):
    return read_rows([{**ROW, **changes}], CATALOG)


def test_a_full_row_becomes_one_point() -> None:
    points = read().points
    assert (points.dp[0], points.fsdp[0], points.zero[0]) == (64, 1, 0)
    assert points.parameters[0] == pytest.approx(3.55e9, rel=0.01)
    assert points.micros[0] == 1
    assert STACKS[int(points.stack[0])] == "megatron-deepspeed"


def test_fully_sharded_replicas_are_shards() -> None:
    points = read(sharding="full_shard").points
    assert (points.dp[0], points.fsdp[0], points.zero[0]) == (1, 64, 3)


def test_hybrid_shards_stay_in_the_node() -> None:
    points = read(sharding="hsdp").points
    assert (points.dp[0], points.fsdp[0], points.zero[0]) == (8, 8, 3)


def test_devices_follow_from_the_layout_where_they_are_not_told() -> None:
    points = read(gpus="", dp="4", tp="8", pp="2").points
    assert points.devices[0] == 64


def test_replicas_follow_from_devices_where_they_are_not_told() -> None:
    points = read(dp="", tp="8", pp="2").points
    assert points.replicas[0] == 4


def test_the_count_of_weights_tells_a_gated_mlp() -> None:
    gated = read(
        params="6738149376", layers="32", hidden="4096", ffn="11008", vocab="32000", tied="0"
    )
    assert gated.points.gated[0] == 1
    assert read().points.gated[0] == 0


def test_a_known_name_stands_for_missing_columns() -> None:
    reading = read(model="Llama-3.1-8B pre-training", layers="", hidden="", params="", vocab="")
    assert reading.points.hidden[0] == 4096
    assert reading.points.vocab[0] == 128256


def test_lora_trains_few_weights() -> None:
    points = read(notes="LoRA r=16").points
    assert points.trainable[0] < 0.05 * points.parameters[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu_type": ""}, "gpu_type is empty"),
        ({"gpu_type": "Abacus"}, "not in the catalog"),
        ({"layers": "", "model": "of my own"}, "not a known one"),
        ({"seq_len": ""}, "seq_len is empty"),
        ({"tp": "5"}, "does not divide"),
        ({"precision": "ternary"}, "precision 'ternary'"),
    ],
)
def test_a_row_that_says_too_little_says_what_is_missing(
    changes: dict[str, str], reason: str
) -> None:
    reading = read(**changes)
    assert len(reading.points) == 0
    assert reason in reading.reasons[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": "-1"}, "tp -1 is not above 0"),
        ({"tp": "0"}, "tp 0 is not above 0"),
        ({"pp": "1.5"}, "pp 1.5 is not a whole number"),
        ({"micro_batch": "0"}, "micro_batch 0 is not above 0"),
        ({"seq_len": "-5"}, "seq_len -5 is not above 0"),
        ({"gpus": "inf"}, "gpus 'inf' is not a number"),
        ({"hidden": "wide"}, "hidden 'wide' is not a number"),
        ({"params": "7B"}, "params '7B' is not a number"),
        ({"global_batch": "3"}, "global_batch 3 is below dp 64 x micro_batch 8"),
        ({"global_batch": "3", "micro_batch": ""}, "global_batch 3 is below dp 64"),
        ({"global_batch": "4", "dp": ""}, "global_batch 4 is below micro_batch 8"),
    ],
)
def test_a_row_that_cannot_be_true_says_which_figure(changes: dict[str, str], reason: str) -> None:
    reading = read(**changes)
    assert len(reading.points) == 0
    assert reading.reasons[0] == reason


def test_words_for_nothing_are_empty_fields() -> None:
    assert read(ep="nan", vp="-", params="N/A").reasons == {}


def test_a_batch_of_the_whole_pipeline_is_no_micro_batch() -> None:
    notes = "micro_batch is the pipeline batch"
    assert read(gpus="64", dp="8", pp="8", global_batch="16", notes=notes).reasons == {}


def test_a_device_without_units_for_few_bits_computes_in_more() -> None:
    narrow, usual = read(precision="fp8").points, read(precision="bf16").points
    assert narrow.precision[0] == usual.precision[0]
    assert read(precision="fp8", gpu_type="H100").points.precision[0] == PRECISIONS.index("fp8")


def test_a_micro_batch_that_nobody_told_is_the_least_under_a_pipeline() -> None:
    assert read(micro_batch="", dp="8", pp="8").points.micro_batch[0] == 1
    assert read(micro_batch="", dp="8", tp="8").points.micro_batch[0] == 4


def test_a_cut_sequence_is_as_the_notes_say() -> None:
    told = {
        notes: read(tp="8", dp="8", notes=notes).points.sequence[0]
        for notes in ("sequence_parallel=False", "sequence_parallel=True", "")
    }
    assert list(told.values()) == [0, 1, 0]


def test_cores_of_a_chip_are_devices_of_the_layout() -> None:
    reading = read(gpu_type="Trainium1", gpus="512", dp="32", tp="32", pp="1", precision="bf16")
    assert reading.points.devices[0] == 1024
    assert reading.cores[0] == 2


def test_a_replica_on_every_core_is_read_from_the_notes() -> None:
    notes = "topology [32xNC(DP)] x 16Nodes(DP)"
    empty = dict.fromkeys(("dp", "tp", "pp", "cp", "sharding"), "")
    reading = read(gpu_type="Trainium1", gpus="256", notes=notes, global_batch="16384", **empty)
    points = reading.points
    assert (points.dp[0], points.fsdp[0], points.zero[0]) == (512, 1, 0)
    assert reading.cores[0] == 2


def test_fewer_sequences_than_devices_are_cut() -> None:
    empty = dict.fromkeys(("dp", "tp", "pp", "cp", "sharding", "micro_batch"), "")
    points = read(gpus="256", global_batch="64", **empty).points
    assert (points.cp[0], points.fsdp[0], points.micros[0]) == (4, 64, 1)


def test_devices_that_nobody_told_hold_the_model() -> None:
    empty = dict.fromkeys(("gpus", "dp", "tp", "pp", "cp", "sharding", "global_batch"), "")
    small = read(**empty, params="", layers="12", hidden="768", heads="12", ffn="3072")
    assert small.points.devices[0] == 1
    large = read(**empty, params="", layers="80", hidden="8192", heads="64", ffn="28672")
    assert large.points.devices[0] == 16


def test_the_least_fleet_has_no_room_for_activations() -> None:
    empty = dict.fromkeys(("gpus", "dp", "tp", "pp", "cp", "sharding", "global_batch"), "")
    large = {"params": "", "layers": "80", "hidden": "8192", "heads": "64", "ffn": "28672"}
    full, none = float(RECOMPUTE.index("full")), float(RECOMPUTE.index("none"))
    assert read(**empty, **large, act_ckpt="").points.recompute[0] == full
    assert read(**empty, **large, act_ckpt="none").points.recompute[0] == none
    assert read(act_ckpt="").points.recompute[0] == none  # its layout is told


def test_the_network_of_a_documented_cluster() -> None:
    assert read().points.network_bytes_per_s[0] == 12.5e9
    assert read(source_id="somebody").points.network_bytes_per_s[0] == 25e9


def test_the_network_that_the_notes_tell() -> None:
    points = read(source_id="somebody", notes="inter-node 4 * 100Gb RoCE").points
    assert points.network_bytes_per_s[0] == 4 * 12.5e9 / 8


def test_a_power_cap_lowers_the_peak() -> None:
    full, capped = (read(gpu_type=name).points.peak_flops[0] for name in ("H100", "H100-96GB-500W"))
    assert 0.7 < capped / full < 0.95


def test_measured_pace_comes_from_the_step_where_it_is_not_told() -> None:
    (pace,) = measured_tokens_per_s([{**ROW, "step_time_s": "4", "tokens_per_s_per_gpu": ""}])
    assert pace == 512 * 2048 / 4 / 64


def test_predicted_rows_keep_their_order_and_their_reasons() -> None:
    bad = {**ROW, "gpu_type": "Abacus"}
    first, second, third = predict_rows([ROW, bad, {**ROW, "seq_len": ""}], CATALOG)
    assert first["reason"] is None
    assert (
        first["tokens_per_s_per_device_p10"]
        < first["tokens_per_s_per_device"]
        < first["tokens_per_s_per_device_p90"]
    )
    assert first["peak_memory_bytes_p10"] < first["peak_memory_bytes_p90"]
    assert isinstance(first["fits"], bool)
    assert "tokens_per_s_per_device" not in second
    assert "catalog" in second["reason"]
    assert third["assumed"] == "seq_len 4096"


def test_a_published_row_is_predicted_within_its_interval() -> None:
    (told,) = predict_rows([ROW], CATALOG)
    assert told["tokens_per_s_per_device_p10"] * 0.9 < 4593.86
    assert told["tokens_per_s_per_device_p90"] * 1.1 > 4593.86


def test_no_rows_no_answers() -> None:
    assert predict_rows([], CATALOG) == []
