from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from yunlu.catalog.machine import Device, Machine
from yunlu.spec.job import Job
from yunlu.training.threads import choose_threads

MACHINE = Machine(
    hostname="here", cores=2, memory_bytes=1,
    devices=(Device(kind="cpu", name="c", memory_bytes=1),),
)  # fmt: skip


def job(**train: object) -> Job:
    return Job.model_validate({"task": "t", "model": "m", "data": "d", "train": train})


@pytest.fixture(autouse=True)
def two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def passes(one_s: float, all_s: float) -> Callable[[], float]:
    return lambda: one_s if torch.get_num_threads() == 1 else all_s


def test_all_threads_are_used_where_they_are_clearly_faster() -> None:
    chosen = choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(1.8, 1.0))
    assert chosen.count == torch.get_num_threads() == 2
    assert chosen.gain == 1.8


@pytest.mark.parametrize("all_s", [0.95, 20.0])
def test_one_thread_is_used_where_more_gain_little_or_harm(all_s: float) -> None:
    chosen = choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(1.0, all_s))
    assert chosen.count == torch.get_num_threads() == 1


def test_the_choice_is_remembered_for_the_same_shape_only() -> None:
    choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(2.0, 1.0))
    torch.set_num_threads(2)
    again = choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(1.0, 9.0))
    assert again.count == 2
    other = choose_threads(job(), MACHINE, shape=(9, 8), time_pass=passes(1.0, 9.0))
    assert other.count == 1


def test_a_number_that_the_user_sets_is_taken_without_measuring() -> None:
    chosen = choose_threads(job(threads=1), MACHINE, shape=(9, 4), time_pass=lambda: 1 / 0)
    assert (chosen.count, chosen.gain) == (1, None)


def test_a_spoilt_memory_is_measured_again(tmp_path: Path) -> None:
    choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(2.0, 1.0))
    (kept,) = (tmp_path / "cache" / "threads").iterdir()
    kept.write_text("{}")
    torch.set_num_threads(2)
    again = choose_threads(job(), MACHINE, shape=(9, 4), time_pass=passes(1.0, 9.0))
    assert again.count == 1
