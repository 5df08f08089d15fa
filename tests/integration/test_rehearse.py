"""``yunlu plan --rehearse``: the memory and the errors of a step, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

JOB = """
task: language-modeling
model: {name: transformer, args: {width: 128, layers: 4, heads: 4}}
data: {train: "synthetic:reviews", max_length: 64, tokenizer: bytes}
train: {epochs: 1, batch: 32}
goal: {gpu: [A100-80GB], cloud: [aws]}
"""


def plan(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(JOB)
    return subprocess.run(
        [sys.executable, "-m", "yunlu.cli.main", "plan", "job.yaml", "--rehearse", *options],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_best_option_is_rehearsed(tmp_path: Path) -> None:
    done = plan(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (rank,) = answer["rehearsal"]["ranks"]
    assert rank["peak_bytes"] == sum(rank["parts"].values())
    # Adam keeps two numbers for each weight, all of four bytes.
    assert 1.9 < rank["parts"]["optimiser state"] / rank["parts"]["weights"] < 2.1
    assert answer["rehearsal"]["samples"] == answer["plan"]["micro_batch"]


def test_a_person_reads_what_takes_the_memory_and_what_fails(tmp_path: Path) -> None:
    done = plan(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimiser state" in done.stdout
    assert "no error of shape, device or sharding" in done.stdout
    refused = plan(tmp_path, "--plot", "out.png")
    assert refused.returncode == 1
    assert "--plot does not go with --rehearse" in refused.stderr
