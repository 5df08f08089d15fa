"""pytest's rewriting of assertions, done once and not in each of the processes that start together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

try:
    from _pytest.assertion import rewrite
except ImportError:  # no part of pytest's API: a version without it rewrites for itself
    rewrite = None

TESTS = Path(__file__).parent


def rewrite_once(config: pytest.Config) -> None:
    """Leave behind what every process of this run would look for, and not find the first time."""
    is_alone = not getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")
    if rewrite is None or is_alone or sys.dont_write_bytecode:
        return
    for file in TESTS.rglob("*.py"):
        if file.name == "conftest.py" or file.name.startswith("test_"):
            kept = rewrite.get_cache_dir(file) / (file.name[:-3] + rewrite.PYC_TAIL)
            if rewrite._read_pyc(file, kept) is None and rewrite.try_makedirs(kept.parent):
                source, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)
