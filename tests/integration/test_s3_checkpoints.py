"""Checkpoints in a real S3-compatible store: there is no rename there, so the manifest comes last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import load
from tests.distributed.ranks import run_world
from tests.integration.test_s3_data import KEYS, s3  # noqa: F401 - a fixture
from yunlu.planning.layouts import Layout
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.checkpoint.storage import MANIFEST, open_storage
from yunlu.training.checkpoint.store import CheckpointStore, SaveGroup
from yunlu.training.tensor_slices import TensorShard, TensorSlice

pytestmark = pytest.mark.slow

ROOT = "s3://lake/run-1/checkpoints"


def open_store(
    options: dict[str, Any], group: SaveGroup | None = None, **settings: Any
) -> CheckpointStore:
    return CheckpointStore(
        ROOT, keep_last=2, keep_best=1, metric="loss", lower_is_better=True, options=options,
        group=group, **({"saved": lambda entry, seconds: None} | settings),
    )  # fmt: skip


def snapshot(step: int, **metrics: float) -> Snapshot:
    weights = {"w": torch.full((3000, 700), float(step))}
    return Snapshot(step=step, tensors={"model": weights}, state={"step": step}, metrics=metrics)


@pytest.fixture
def options(s3: str) -> dict[str, Any]:  # noqa: F811
    import s3fs

    # Not by the environment: workers forked by a server that is up already do not have ours.
    keys = {"key": KEYS["accessKey"], "secret": KEYS["secretKey"]}
    options = {**keys, "client_kwargs": {"endpoint_url": s3}}
    s3fs.S3FileSystem(**options).mkdir("lake")
    return options


def test_checkpoints_are_saved_thinned_and_found_in_s3(options: dict[str, Any]) -> None:
    place = open_storage(ROOT, options)
    told: list[str] = []
    kept = open_store(options, saved=lambda entry, seconds: told.append(entry.where))
    assert kept.open_newest(pytest.fail) is None
    for step, loss in enumerate([0.9, 0.1, 0.5, 0.4], start=1):
        kept.save(snapshot(step, loss=loss))
    kept.wait()
    assert [entry.step for entry in files.entries(place)] == [2, 3, 4]
    assert told[0].startswith(f"{ROOT}/step-0000000001")
    best = kept.open_best(pytest.fail)
    assert best is not None
    assert best.step == 2
    assert load(best, "model")["w"].unique().tolist() == [2.0]

    # A worker died while it uploaded: files without a manifest.
    torn = place.begin(9, "dead")
    place.put(torn, "rank-00000.safetensors", b"half")
    # One was damaged in the store.
    newest = place.published()[0]
    place.put(newest, "rank-00000.safetensors", b"damaged")
    said: list[str] = []
    found = kept.open_newest(said.append)
    assert found is not None
    assert found.step == 3
    assert len(said) == 1
    assert place.get(torn, "rank-00000.safetensors") is None, "swept"

    # The same step again replaces the damaged one, which goes only after the new one is there.
    kept.save(snapshot(4, loss=0.4))
    kept.wait()
    found = kept.open_newest(pytest.fail)
    assert found is not None
    assert found.step == 4
    assert sum(name.startswith("step-0000000004") for name in place.published()) == 1

    kept.forget_after(2)
    assert [entry.step for entry in files.entries(place)] == [2]
    place.remove(place.published()[0], MANIFEST)
    assert kept.open_newest(pytest.fail) is None
    kept.close()


def _save_half(world: Any, options: dict[str, Any]) -> None:
    group = SaveGroup(rank=world.rank, size=2, token="g1")
    kept = open_store(options, group)
    half = TensorShard(
        "w", (10,), TensorSlice((5 * world.rank,), (5,)), torch.full((5,), float(world.rank))
    )
    kept.save(Snapshot(step=1, shards={"model": {"w": half}}, state={}))
    kept.close()


def test_several_workers_save_one_checkpoint_in_s3(options: dict[str, Any], tmp_path: Path) -> None:
    run_world(_save_half, Layout(fsdp=2), options)
    kept = open_store(options)
    reader = kept.open_newest(pytest.fail)
    kept.close()
    assert reader is not None
    assert reader.read("model/w", TensorSlice((3,), (4,))).tolist() == [0, 0, 1, 1]
    reader.close()
