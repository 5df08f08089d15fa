from __future__ import annotations

from pathlib import Path

import pytest

from yunlu.planning.plan import AutotuneTrial, StepSettings
from yunlu.training.autotune.tune import TunedSettings, load_cached, save_cached


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def found(threads: int) -> TunedSettings:
    trial = AutotuneTrial(name="threads", value="1", sample_s=1.0, speedup=2.0, is_adopted=True)
    settings = StepSettings(threads=threads, micro_batch=8)
    return TunedSettings(settings=settings, reasons={"threads": "why"}, trials=(trial,))


def test_the_same_shape_gets_the_same_settings_marked_as_remembered() -> None:
    save_cached(["here", 7], found(1))
    again = load_cached(["here", 7])
    assert again is not None
    assert again.settings == found(1).settings
    assert all(trial.remembered for trial in again.trials)
    assert load_cached(["here", 8]) is None


def test_of_two_runs_that_measured_at_once_the_first_to_write_decides_for_both() -> None:
    assert save_cached(["here"], found(1)).settings.threads == 1
    assert save_cached(["here"], found(2)).settings.threads == 1


def test_a_damaged_entry_or_no_cache_at_all_only_means_measuring_again(own_cache: Path) -> None:
    save_cached(["here"], found(1))
    (entry,) = (own_cache / "settings").iterdir()
    entry.write_text("{")
    assert load_cached(["here"]) is None
    own_cache.rename(own_cache.with_name("gone"))
    own_cache.write_text("a file where the cache should be")
    assert save_cached(["there"], found(2)).settings.threads == 2
