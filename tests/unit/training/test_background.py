"""What is done beside training leaves the thread that trains alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, re, sys
import torch
from concurrent.futures import ThreadPoolExecutor
from yunlu.training.checkpoint.store import open_background

def count():
    return len(os.listdir("/proc/self/task"))

def work():
    torch.zeros(1 << 22).add_(1.0)

torch.set_num_threads(3)
work()  # those of this thread are there now
before = count()
pool = open_background("test") if sys.argv[1] == "ours" else ThreadPoolExecutor(1)
pool.submit(work).result()
print(count() - before)
print(torch.get_num_threads())
print(set(re.findall(r"(?:omp|mkl)_get_max_threads\\(\\) : (\\d+)", torch.__config__.parallel_info())))
"""


def run(whose: str) -> list[str]:
    words = [sys.executable, "-c", PROGRAM, whose]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[:3]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_background_thread_gets_no_helpers_and_training_keeps_its_own() -> None:
    assert run("ours") == ["1", "3", "{'3'}"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_plain_thread_would_get_helpers() -> None:
    """Else there is nothing to guard against any more."""
    assert int(run("plain")[0]) > 1
