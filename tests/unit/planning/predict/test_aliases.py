"""Words of tables: many spellings of one thing are read alike."""

from __future__ import annotations

import pytest

from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE
from yunlu.planning.predict.rows import (
    UnreadableRowError,
    network_of,
    precision_of,
    recompute_of,
    sharding_of,
    stack_of,
)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("bf16", ("amp_bf16", "", "torch.bfloat16", "mixed", "None")),
        ("fp8", ("mxfp8", "FP8-CS", "E4M3")),
        ("fp4", ("nvfp4",)),
        ("fp16", ("float16", "half")),
        ("fp32", ("FP32",)),
    ],
)
def test_names_of_precisions(name: str, texts: tuple[str, ...]) -> None:
    assert {precision_of(text) for text in texts} == {name}
    assert name in PRECISIONS


def test_a_precision_that_is_none_is_refused() -> None:
    with pytest.raises(UnreadableRowError, match="ternary"):
        precision_of("ternary")


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("full", ("full", "every_layer", "TRUE", "enabled", "block", "full recompute", "1")),
        ("selective", ("Selective", "selective (attention)", "core_attn")),
        ("none", ("none", "disabled", "False", "0", "no")),
    ],
)
def test_what_is_computed_again(name: str, texts: tuple[str, ...]) -> None:
    assert {recompute_of(text) for text in texts} == {RECOMPUTE.index(name)}


def test_silence_says_nothing() -> None:
    assert recompute_of("") is None
    assert sharding_of("n/a") is None
    assert network_of("8x80GB in a node", "A100") is None


@pytest.mark.parametrize(
    ("stage", "texts"),
    [
        (0, ("zero0", "ddp", "none", "NO_SHARD")),
        (1, ("zero1", "ZeRO-1", "Zero 1", "zero_1", "distributed optimizer", "zero1=8", "1")),
        (2, ("zero2", "SHARD_GRAD_OP")),
        (3, ("fsdp2", "FULL_SHARD", "zero 3", "stage3", "mcore-fsdp")),
    ],
)
def test_what_is_shared_out(stage: int, texts: tuple[str, ...]) -> None:
    assert {sharding_of(text) for text in texts} == {(stage, "")}


def test_hybrid_shards_are_told_apart() -> None:
    assert sharding_of("HYBRID_SHARD") == sharding_of("hsdp") == (3, "node")


@pytest.mark.parametrize(
    ("row", "stack"),
    [
        ({"source_id": "somebody"}, "unknown"),
        ({"stack": "Torchtitan"}, "torchtitan"),
        ({"source_id": "x", "source": "pytorch/torchtitan benchmarks"}, "torchtitan"),
        ({"source_id": "megatron_sc21", "gpu_type": "A100-80GB"}, "megatron-deepspeed"),
        ({"source_id": "Megatron-LM", "gpu_type": "H100-80GB-SXM"}, "megatron-bridge"),
        ({"source_id": "internevo"}, "unknown-flash-1"),
        ({"source_id": "x", "notes": "kernel=flash_attention2 + RMS kernel"}, "unknown"),
        ({"source_id": "x", "notes": "kernel=flash_attention2"}, "unknown-norms"),
        ({"source_id": "x", "notes": "kernel=flash_attentionv1.0.8"}, "unknown-flash-1-norms"),
        ({"source_id": "x", "notes": "kernel=torch"}, "unknown-scores-norms"),
        ({"source_id": "nanotron", "notes": "flash-attn"}, "nanotron"),
    ],
)
def test_whose_software_ran_a_row(row: dict[str, str], stack: str) -> None:
    assert stack_of(row) == stack
    assert stack in STACKS
