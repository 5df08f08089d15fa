"""A checkpoint is complete or absent; damage is always found; nothing in it ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import load, read, write
from yunlu.core.errors import CheckpointError, TrainingError
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.files import Snapshot, describe_bytes, pack_manifest
from yunlu.training.checkpoint.storage import LocalStorage
from yunlu.training.checkpoint.store import (
    CheckpointStore,
    SaveGroup,
    WriterAssignment,
    assign_writers,
)
from yunlu.training.tensor_slices import TensorShard, TensorSlice, shard_of

WEIGHTS = "rank-00000.safetensors"


def snapshot(step: int = 1, size: int = 64, **metrics: float) -> Snapshot:
    weights = {"weight": torch.arange(size, dtype=torch.float32) + step}
    return Snapshot(step=step, tensors={"model": weights}, state={"step": step}, metrics=metrics)


def store(root: Path, **options: int) -> CheckpointStore:
    settings = {"keep_last": 2, "keep_best": 1} | options
    return CheckpointStore(
        root, metric="loss", lower_is_better=True, saved=lambda entry, seconds: None, **settings
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    back = read(write(tmp_path, snapshot(7, loss=0.5)))
    assert back.step == 7
    assert back.metrics == {"loss": 0.5}
    assert torch.equal(load(back, "model")["weight"], snapshot(7).tensors["model"]["weight"])


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot())
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(len(whole) // 40, 1)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << (place % 8)
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                read(path)
        file.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "torn", "zeroed"])
def test_a_torn_checkpoint_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path, snapshot())
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        half = content[: len(content) // 2]
        file.write_bytes(half if damage == "torn" else half + bytes(len(content) - len(half)))
    with pytest.raises(CheckpointError):
        read(path)


class Canary:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as someone would who knows how its checksums are made."""
    body = json.loads((path / "manifest.json").read_text())
    body.pop("checksum")
    change(body)
    for name in body["files"]:
        if (path / name).is_file():
            body["files"][name] = describe_bytes((path / name).read_bytes())
    (path / "manifest.json").write_bytes(pack_manifest(body))


def test_a_pickle_in_a_checkpoint_never_runs_even_with_a_valid_manifest(tmp_path: Path) -> None:
    canary = tmp_path / "it-ran"
    path = write(tmp_path / "checkpoints", snapshot())
    for name in (WEIGHTS, ".metadata", "__0_0.distcp"):
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    forge(path, lambda body: None)
    with pytest.raises(CheckpointError):
        read(path)
    assert not canary.exists()


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda body: body["files"].update({"../../secret": {"bytes": 1}}),
    "an absolute file": lambda body: body["files"].update({"/etc/passwd": {"bytes": 1}}),
    "another file": lambda body: body["files"].update({".metadata": {"bytes": 1}}),
    "a NUL": lambda body: body["files"].update({"rank-00000.safetensors\0": {"bytes": 1}}),
    "no state": lambda body: body["files"].pop("state.json"),
    "a piece in no file": lambda body: weight(body).update(shards=[["rank-00009.safetensors", [0], [64]]]),
    "a piece in the state": lambda body: weight(body).update(shards=[["state.json", [0], [64]]]),
    "a larger tensor": lambda body: weight(body).update(shape=[128]),
    "a smaller tensor": lambda body: weight(body).update(shape=[32]),
    "another shape": lambda body: weight(body).update(
        shape=[8, 8], shards=[[WEIGHTS, [0, 0], [8, 8]]]
    ),
    "an offset": lambda body: weight(body).update(shards=[[WEIGHTS, [1], [64]]]),
    "a negative offset": lambda body: weight(body).update(shards=[[WEIGHTS, [-1], [64]]]),
    "a huge tensor": lambda body: weight(body).update(
        shape=[1 << 50], shards=[[WEIGHTS, [0], [1 << 50]]]
    ),
    "sizes beyond all": lambda body: weight(body).update(shape=[1 << 80], shards=[]),
    "true as a size": lambda body: weight(body).update(shape=[True], shards=[]),
    "a hole": lambda body: weight(body).update(shards=[[WEIGHTS, [0], [32]]]),
    "no pieces": lambda body: weight(body).update(shards=[]),
    "another type": lambda body: weight(body).update(dtype="I32"),
    "an unknown type": lambda body: weight(body).update(dtype="PICKLE"),
    "another name": lambda body: body["tensors"].update({"model/w": weight(body)}),
    "a name without a group": lambda body: body["tensors"].update({"../x": weight(body)}),
    "pieces of another kind": lambda body: weight(body).update(shards={"a": 1}),
    "tensors of another kind": lambda body: body.update(tensors=[1]),
    "files of another kind": lambda body: body.update(files=[1, 2]),
    "a step of another kind": lambda body: body.update(step="7"),
    "the format of tomorrow": lambda body: body.update(version=99),
}  # fmt: skip


def weight(body: dict[str, Any]) -> dict[str, Any]:
    return body["tensors"]["model/weight"]


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    path = write(tmp_path / "checkpoints", snapshot())
    (tmp_path / "secret").write_text("x")
    body = json.loads((path / "manifest.json").read_text())
    body.pop("checksum")
    LIES[lie](body)
    (path / "manifest.json").write_bytes(pack_manifest(body))
    with pytest.raises(CheckpointError):
        read(path)


def test_a_link_out_of_the_checkpoint_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", snapshot())
    (path / WEIGHTS).rename(tmp_path / "elsewhere")
    (path / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="missing"):
        read(path)


def test_a_manifest_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot())
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="manifest"):
        read(path)


def test_files_are_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "counts": torch.arange(7, dtype=torch.int16),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "strided": torch.randn(6, 4).t(),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    path = write(tmp_path, Snapshot(step=1, tensors={"model": tensors, "none": {}}, state={}))
    by_library = load_file(path / WEIGHTS)
    back = load(read(path), "model")
    assert back.keys() == tensors.keys()
    assert load(read(path), "none") == {}
    for name, tensor in tensors.items():
        assert torch.equal(by_library[f"model/{name}"], tensor)
        assert torch.equal(back[name], tensor)
        assert back[name].dtype == tensor.dtype


def test_any_region_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    tensor = torch.arange(4 * 6 * 5).view(4, 6, 5)
    reader = read(write(tmp_path, Snapshot(step=1, tensors={"model": {"w": tensor}}, state={})))
    assert torch.equal(reader.read("model/w", TensorSlice((1, 2, 0), (2, 3, 5))), tensor[1:3, 2:5])
    assert reader.read("model/w", TensorSlice((1, 2, 0), (0, 3, 5))).shape == (0, 3, 5)


def test_live_tensors_are_saved_as_they_were_though_training_goes_on(tmp_path: Path) -> None:
    live = {"w": torch.full((1000, 100), 1.0), "buffer": torch.full((10,), 1.0)}
    kept = store(tmp_path, keep_last=9)
    for step, defer in ((1, False), (2, True), (3, True)):
        shards = {"model": {name: shard_of(name, tensor) for name, tensor in live.items()}}
        kept.save(
            Snapshot(step=step, shards=shards, state={}), defer=defer, moving={"model/buffer"}
        )
        live["buffer"] += 1  # a forward pass
        kept.finish_copy()
        live["w"] += 1
    kept.close()
    for step in (1, 2, 3):
        back = load(read(tmp_path / f"step-{step:010d}"), "model")
        assert back["w"].unique().tolist() == [float(step)]
        assert back["buffer"].unique().tolist() == [float(step)]


def test_memory_for_the_copy_is_used_again(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.reserve(4 * 1000)
    kept.wait()
    memory = kept._buffer._memory.data_ptr()
    for step in (1, 2):
        shards = {"model": {"w": shard_of("w", torch.ones(1000))}}
        kept.save(Snapshot(step=step, shards=shards, state={}))
        assert kept._buffer._memory.data_ptr() == memory
    kept.close()


def test_a_save_that_is_given_up_publishes_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    alone_of_two = CheckpointStore(
        tmp_path, keep_last=1, keep_best=1, metric="loss", lower_is_better=True,
        saved=lambda entry, seconds: pytest.fail("published"), group=SaveGroup(rank=0, size=2, token="g1"),
    )  # fmt: skip
    alone_of_two._writers = WriterAssignment(SaveGroup())  # the other one does not answer here
    alone_of_two.save(snapshot(1))
    pool = alone_of_two._pool
    alone_of_two.abandon()
    pool.shutdown()
    assert files.entries(LocalStorage(tmp_path)) == []
    assert store(tmp_path).open_newest(pytest.fail) is None


def test_a_worker_that_never_reports_ends_the_save(tmp_path: Path) -> None:
    group = SaveGroup(rank=0, size=2, token="g1")
    place = LocalStorage(tmp_path)
    directory = place.begin(1, group.token)
    files.write_part(place, directory, group, {}, groups=[], between=lambda: None)
    with pytest.raises(CheckpointError, match=r"\[1\] have not saved"):
        files.publish(place, directory, group, snapshot(1), patience_s=0, between=lambda: None)
    files.report_failure(place, directory, SaveGroup(rank=1, size=2, token="g1"), "disk full")
    with pytest.raises(CheckpointError, match="Worker 1 could not save its part: disk full"):
        files.publish(place, directory, group, snapshot(1), patience_s=0, between=lambda: None)


def test_a_save_with_a_hole_is_not_published(tmp_path: Path) -> None:
    group = SaveGroup()
    place = LocalStorage(tmp_path)
    directory = place.begin(1, group.token)
    half = TensorShard("model/w", (8,), TensorSlice((0,), (4,)), torch.zeros(4))
    files.write_part(
        place, directory, group, {"model/w": half}, groups=["model"], between=lambda: None
    )
    with pytest.raises(CheckpointError, match="hole"):
        files.publish(place, directory, group, snapshot(1), patience_s=0, between=lambda: None)
    assert files.entries(place) == []


def test_replicas_share_the_writing() -> None:
    region = TensorSlice((0,), (100,))
    parts = [(f"w{number}", region, 400 + number) for number in range(12)]
    writers = assign_writers([parts, parts, parts])
    assert sorted(name for names in writers for name in names) == sorted(name for name, *_ in parts)
    assert {len(names) for names in writers} == {4}


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=2, keep_best=1)
    for step, loss in enumerate([0.9, 0.2, 0.8, 0.7, 0.6], start=1):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    assert [entry.step for entry in files.entries(LocalStorage(tmp_path))] == [2, 4, 5]
    best = kept.open_best(pytest.fail)
    assert best is not None
    assert best.step == 2


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1, keep_best=1)
    for step, loss in enumerate([float("nan"), 0.5, float("nan"), 0.4, float("nan")], start=1):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    assert [entry.step for entry in files.entries(LocalStorage(tmp_path))] == [4, 5]
    best = kept.open_best(pytest.fail)
    assert best is not None
    assert best.step == 4


def test_a_damaged_best_is_passed_over_and_said_so(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for step, loss in ((1, 0.1), (2, 0.2)):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    (tmp_path / "step-0000000001" / "rank-00000.safetensors").write_bytes(b"")
    said: list[str] = []
    best = kept.open_best(said.append)
    assert best is not None
    assert best.step == 2
    assert "step-0000000001" in said[0]


def test_a_damaged_checkpoint_of_a_later_step_does_not_displace_new_ones(tmp_path: Path) -> None:
    before = store(tmp_path, keep_last=1)
    before.save(snapshot(9, loss=0.1))
    before.close()
    (tmp_path / "step-0000000009" / "rank-00000.safetensors").write_bytes(b"")
    after = store(tmp_path, keep_last=1)
    assert after.open_newest(lambda _: None) is None, "so the training starts over"
    for step, loss in ((3, 0.3), (6, 0.4)):
        after.save(snapshot(step, loss=loss))
    after.close()
    found = after.open_newest(lambda _: None)
    assert found is not None
    assert found.step == 6
    assert {entry.step for entry in files.entries(LocalStorage(tmp_path))} == {3, 6, 9}


def test_the_newest_good_one_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        kept.save(snapshot(step))
    kept.close()
    (tmp_path / "step-0000000003" / "state.json").unlink()
    (tmp_path / "step-0000000002" / "rank-00000.safetensors").write_bytes(b"")
    said: list[str] = []
    found = kept.open_newest(said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 2
    assert "step-0000000003" in said[0]


def test_what_a_killed_writer_left_is_swept_and_never_loaded(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(snapshot(1))
    kept.close()
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / ".part-step-0000000002-99")
    found = kept.open_newest(lambda _: None)
    assert found is not None
    assert found.step == 1
    assert not list(tmp_path.glob(".part-*"))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(4))
    (path / "rank-00000.safetensors").write_bytes(b"")
    again = read(write(tmp_path, snapshot(4)))
    assert torch.equal(load(again, "model")["weight"], snapshot(4).tensors["model"]["weight"])


def test_a_full_disk_is_told_and_spares_the_earlier_checkpoint(small_disk: Path) -> None:
    kept = store(small_disk)
    kept.save(snapshot(1, size=100_000))
    kept.save(snapshot(2, size=200_000))
    with pytest.raises(TrainingError, match="No space left"):
        kept.close()
    assert read(small_disk / "step-0000000001").step == 1
    assert not list(small_disk.glob(".part-*"))
