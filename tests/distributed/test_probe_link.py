"""Two real workers that exchange arrays for the probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed


def _exchange(rank: int, store: str) -> dict[str, Any] | None:
    from yunlu.training.probing.links import exchange

    found = exchange(rank, store, (16, 1024), 2)
    return None if found is None else found.model_dump()


def test_the_first_worker_gets_the_figures_of_both(tmp_path: Path) -> None:
    first, second = run_ranks(_exchange, 2, str(tmp_path / "store"))
    assert second is None
    assert first["backend"] == "gloo"
    for way in ("all_reduce", "send"):
        assert first[way]["sizes"] == (16.0, 1024.0)
        assert all(each > 0 for each in first[way]["seconds"])
        assert first[way]["message_s"] >= 0
        assert first[way]["bytes_per_s"] > 0
