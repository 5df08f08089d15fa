"""A checkpoint is complete or absent; damage is always found; nothing in it ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from yunlu.core.errors import CheckpointError, TrainingError
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.checkpoint.store import CheckpointStore


def snapshot(step: int = 1, size: int = 64, **metrics: float) -> Snapshot:
    weights = {"weight": torch.arange(size, dtype=torch.float32) + step}
    return Snapshot(step=step, tensors={"model": weights}, state={"step": step}, metrics=metrics)


def store(root: Path, **options: int) -> CheckpointStore:
    settings = {"keep_last": 2, "keep_best": 1} | options
    return CheckpointStore(
        root, metric="loss", lower_is_better=True, saved=lambda entry, seconds: None, **settings
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    entry = files.write(tmp_path, snapshot(7, loss=0.5))
    back = files.read(entry.path)
    assert back.step == 7
    assert back.metrics == {"loss": 0.5}
    assert torch.equal(back.tensors["model"]["weight"], snapshot(7).tensors["model"]["weight"])


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = files.write(tmp_path, snapshot()).path
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(len(whole) // 40, 1)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << (place % 8)
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                files.read(path)
        file.write_bytes(whole)
    files.read(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "torn", "zeroed"])
def test_a_torn_checkpoint_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = files.write(tmp_path, snapshot()).path
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        half = content[: len(content) // 2]
        file.write_bytes(half if damage == "torn" else half + bytes(len(content) - len(half)))
    with pytest.raises(CheckpointError):
        files.read(path)


class Canary:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_a_checkpoint_never_runs_even_with_a_valid_manifest(tmp_path: Path) -> None:
    canary = tmp_path / "it-ran"
    path = files.write(tmp_path / "checkpoints", snapshot()).path
    (path / "model.safetensors").write_bytes(pickle.dumps(Canary(canary)))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("checksum")
    manifest["files"]["model.safetensors"] = files._describe(path / "model.safetensors")
    manifest["checksum"] = files._checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        files.read(path)
    assert not canary.exists()


def test_a_manifest_that_points_outside_its_directory_is_refused(tmp_path: Path) -> None:
    path = files.write(tmp_path / "checkpoints", snapshot()).path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("checksum")
    (tmp_path / "secret").write_text("x")
    manifest["files"]["../../secret"] = files._describe(tmp_path / "secret")
    manifest["checksum"] = files._checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="altered"):
        files.read(path)


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=2, keep_best=1)
    for step, loss in enumerate([0.9, 0.2, 0.8, 0.7, 0.6], start=1):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    assert [entry.step for entry in files.entries(tmp_path)] == [2, 4, 5]
    best = kept.best(pytest.fail)
    assert best is not None
    assert best.step == 2


def test_a_score_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1, keep_best=1)
    for step, loss in enumerate([float("nan"), 0.5, float("nan"), 0.4, float("nan")], start=1):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    assert [entry.step for entry in files.entries(tmp_path)] == [4, 5]
    best = kept.best(pytest.fail)
    assert best is not None
    assert best.step == 4


def test_a_damaged_best_is_passed_over_and_said_so(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for step, loss in ((1, 0.1), (2, 0.2)):
        kept.save(snapshot(step, loss=loss))
    kept.close()
    (tmp_path / "step-0000000001" / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    best = kept.best(said.append)
    assert best is not None
    assert best.step == 2
    assert "step-0000000001" in said[0]


def test_a_damaged_checkpoint_of_a_later_step_does_not_displace_new_ones(tmp_path: Path) -> None:
    before = store(tmp_path, keep_last=1)
    before.save(snapshot(9, loss=0.1))
    before.close()
    (tmp_path / "step-0000000009" / "model.safetensors").write_bytes(b"")
    after = store(tmp_path, keep_last=1)
    assert after.newest_good(lambda _: None) is None, "so the training starts over"
    for step, loss in ((3, 0.3), (6, 0.4)):
        after.save(snapshot(step, loss=loss))
    after.close()
    found = after.newest_good(lambda _: None)
    assert found is not None
    assert found.step == 6
    assert {entry.step for entry in files.entries(tmp_path)} == {3, 6, 9}


def test_the_newest_good_one_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        kept.save(snapshot(step))
    kept.close()
    (tmp_path / "step-0000000003" / "state.json").unlink()
    (tmp_path / "step-0000000002" / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    found = kept.newest_good(said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 2
    assert "step-0000000003" in said[0]


def test_what_a_killed_writer_left_is_swept_and_never_loaded(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(snapshot(1))
    kept.close()
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / ".part-step-0000000002-99")
    found = kept.newest_good(lambda _: None)
    assert found is not None
    assert found.step == 1
    assert not list(tmp_path.glob(".part-*"))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = files.write(tmp_path, snapshot(4)).path
    (path / "model.safetensors").write_bytes(b"")
    assert files.read(files.write(tmp_path, snapshot(4)).path).step == 4


def test_a_full_disk_is_told_and_spares_the_earlier_checkpoint(small_disk: Path) -> None:
    kept = store(small_disk)
    kept.save(snapshot(1, size=100_000))
    kept.save(snapshot(2, size=200_000))
    with pytest.raises(TrainingError, match="No space left"):
        kept.close()
    assert files.read(small_disk / "step-0000000001").step == 1
    assert not list(small_disk.glob(".part-*"))
