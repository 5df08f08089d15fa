"""Marked secrets of many kinds are found nowhere in clear, and another user of the machine gets nothing.

One run on two workers whose code prints them, one that fails with them; both really produced by the command.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from yunlu.cli.main import main
from yunlu.scheduler.pool_store import PoolSettings
from yunlu.scheduler.service import only_service
from yunlu.tuning.records import create_records
from yunlu.tuning.study_dir import StudyDir, StudyRequest

NOBODY = 65534


def canary(number: int) -> str:
    """A value that nothing else contains."""
    return f"c4n4ry{number:02d}SingsInThe9Mine"


def basic(number: int) -> str:
    return base64.b64encode(f"me:{canary(number)}".encode()).decode()


VARIABLES = {
    "WANDB_API_KEY": canary(1),
    "AWS_SECRET_ACCESS_KEY": f"{canary(2)}/with+slash",
    "MLFLOW_TRACKING_PASSWORD": canary(3),
    "MY_SERVICE_TOKEN": canary(4),
    "DATABASE_URL": f"postgresql://me:{canary(5)}@db/x",
    "FSSPEC_HTTP": json.dumps(
        {"headers": {"X-Door": "open", "Authorization": f"Bearer {canary(6)}"}}
    ),
}
"""The right place for them; the code of the job below says them aloud."""
SAID = {
    "values of variables": " ".join([canary(1), f"{canary(2)}/with+slash", canary(3), canary(4)]),
    "password of a variable's URL": canary(5),
    "header of a variable": canary(6),
    "password in a URL": f"cannot open https://me:{canary(7)}/x@host/data.csv",
    "token in a URL": f"cannot open https://{canary(8)}@host/data.csv",
    "presigned URL": f"403 for https://b/x?X-Amz-Credential={canary(9)}&X-Amz-Signature={canary(9)}",
    "token in a query": f"403 for https://h/x?token={canary(10)}",
    "bearer header": f"sent Authorization: Bearer {canary(11)}",
    "basic header": f"sent {{'Authorization': 'Basic {basic(12)}'}}",
    "key header": f"sent X-Api-Key: {canary(13)}",
    "options": repr({"anon": False, "secret": canary(14), "client": {"api_key": canary(14)}}),
    "pair": f"login(password='{canary(15)}')",
    "GitHub": f"ghp_{canary(16)}",
    "Hugging Face": f"hf_{canary(17)}",
    "API key": f"sk-{canary(18)}",
    "web token": f"eyJhbGciOiJIUzI1NiJ9.{canary(19)}.{canary(19)}",
    "private key": f"-----BEGIN RSA PRIVATE KEY-----\n{canary(20)}\n-----END RSA PRIVATE KEY-----",
    "connection string": f"AccountName=x;AccountKey={canary(21)}==;",
}
IN_FILE = canary(22)
IN_REMOTE = canary(23)
MARKS = [canary(number) for number in range(1, 24)] + [basic(12)]

LEAKY = """
import json, logging, os, sys, warnings
from pathlib import Path
from torch import nn

SAID = json.loads(Path(__file__).with_name("said.json").read_text())

class Net(nn.Module):
    def __init__(self, inputs, outputs, fail=False):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        for text in SAID.values():
            print("printed", text)
            print("partly", text, end=" ", file=sys.stderr)
            logging.getLogger("leaky").error("logged %s", text)
            warnings.warn("warned " + text)
        print(file=sys.stderr)
        if fail:
            raise ValueError("failed: " + " ; ".join(SAID.values()))

    def forward(self, x):
        return self.layer(x)

class Tracker:
    def start(self, run, job, *, resumed):
        raise RuntimeError("tracker failed: " + " ; ".join(SAID.values()))
    def log(self, metrics, *, step): ...
    def finish(self, *, state, summary): ...
"""
JOB = """
name: NAME
task: tabular-classification
model: {name: "leaky:Net", args: {fail: FAIL}}
data: {train: points.csv, target: label}
train: {steps: 4, batch: 8, evaluate: never, threads: 1, workers: 0, trial_share: 0, compile: false}
trackers: ["leaky:Tracker"]
devices: DEVICES
# password: SECRET
"""


@dataclass
class Stage:
    """A directory that everybody may enter, with a home, and what the commands in it printed."""

    path: Path
    environment: dict[str, str]
    printed: str = ""
    commands: set[str] = field(default_factory=set[str])

    def call(self, *arguments: str) -> tuple[int, str]:
        """The command in this process: it starts sooner."""
        output = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            patch.chdir(self.path)
            for name in ("YUNLU_HOME", "YUNLU_CACHE"):
                patch.setenv(name, self.environment[name])
            code = main(arguments)
        self.printed += output.getvalue()
        return code, output.getvalue()

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def yunlu(self, *arguments: str) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+") as output:
            command = [sys.executable, "-m", "yunlu.cli.main", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=self.path, env=self.environment, umask=0,
            )  # fmt: skip
            while process.poll() is None:
                self.note_commands(process.pid)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.05)
            output.seek(0)
            text = output.read()
        self.printed += text
        return process.returncode, text

    def note_commands(self, pid: int) -> None:
        """What the process list shows of it and of all that it started."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self.commands.add(" ".join(process.cmdline()))


@pytest.fixture(scope="module")
def stage(measured_once: Path) -> Iterator[Stage]:
    path = Path(tempfile.mkdtemp(prefix="yunlu-secrets-"))
    path.chmod(0o755)  # pytest's own directories would keep everybody out by themselves
    try:
        (path / "leaky.py").write_text(LEAKY)
        (path / "said.json").write_text(json.dumps(SAID))
        rows = [f"{i % 7},{i % 3},{'ab'[i % 2]}" for i in range(64)]
        (path / "points.csv").write_text("x,y,label\n" + "\n".join(rows) + "\n")
        for name, fail, devices in (("told", "false", "2"), ("failed", "true", "1")):
            text = JOB.replace("NAME", name).replace("FAIL", fail).replace("DEVICES", devices)
            (path / f"{name}.yaml").write_text(text.replace("SECRET", IN_FILE))
        remote = f"https://me:{IN_REMOTE}@host/x.git"
        for arguments in (["init", "-q"], ["remote", "add", "origin", remote]):
            subprocess.run(["git", "-C", str(path), *arguments], check=True)
        shutil.copytree(measured_once, path / "cache")
        environment = {
            **os.environ, **VARIABLES, "YUNLU_HOME": str(path / "home"),
            "YUNLU_CACHE": str(path / "cache"), "YUNLU_LANG": "en", "YUNLU_PATIENCE": "5",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        yield Stage(path, environment)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def trained(stage: Stage) -> Stage:
    """One run that finished on two workers and one that failed, looked at in every way."""
    code, text = stage.yunlu("train", "told.yaml")
    assert code == 0, text
    code, text = stage.yunlu("--debug", "train", "failed.yaml")
    assert code == 1, text
    assert "failed: ***" in text
    for arguments in (("logs", "told"), ("logs", "told", "--rank", "1"), ("logs", "failed"),
                      ("show", "failed"), ("report", "failed")):  # fmt: skip
        code, text = stage.call(*arguments)
        assert code == 0, text
    return stage


def marks_in(content: bytes) -> list[str]:
    return [mark for mark in MARKS if mark.encode() in content]


def test_no_secret_is_found_in_files_output_or_process_list(trained: Stage) -> None:
    files = [path for path in trained.home.rglob("*") if path.is_file()]
    found = {str(path): marks for path in files if (marks := marks_in(path.read_bytes()))}
    assert found == {}
    assert marks_in(trained.printed.encode()) == []
    assert marks_in("\n".join(trained.commands).encode()) == []
    # They were there to be found: said in the log, in events, in the copy of the job.
    logs = "".join(path.read_text() for path in files if path.suffix == ".log")
    events = "".join(path.read_text() for path in files if path.name == "events.jsonl")
    assert all(word in logs for word in ("printed ***", "logged ***", "warned ***", "partly ***"))
    assert "tracker failed: ***" in events
    assert "failed: ***" in events
    assert all("# password: ***" in path.read_text() for path in files if path.name == "job.source")
    assert any("yunlu.training" in command for command in trained.commands)


REFUSED: dict[str, Callable[[str], Sequence[str]]] = {
    "--set of a secret": lambda mark: [
        "train",
        "told.yaml",
        "--set",
        f"data.options.secret={mark}",
    ],
    "--set of a URL": lambda mark: ["plan", "told.yaml", "--set", f"data.train=s3://a:{mark}@b/x"],
    "file for submit": lambda _: ["submit", "bad.yaml"],
    "file for tune": lambda _: ["tune", "bad.yaml"],
    "file for validate": lambda _: ["validate", "bad.yaml"],
    "URL for init": lambda mark: [
        "init",
        "tabular-regression",
        f"https://{mark}@h/x",
        "-o",
        "i.yaml",
    ],
    "misspelt option": lambda mark: ["train", "told.yaml", f"--sett=data.options.secret={mark}"],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_command_with_a_credential_is_refused_without_showing_it(stage: Stage, kind: str) -> None:
    mark = canary(40)
    bad = (
        "task: tabular-classification\nmodel: mlp\nsearch: {space: {train.optimizer.lr: [1, 2]}}\n"
        "data:\n  train: https://h/x.csv\n  options: {headers: {Authorization: Bearer "
        + mark
        + "}}\n"
    )
    (stage.path / "bad.yaml").write_text(bad)
    before = sorted(stage.home.glob("*"))
    code, text = stage.call(*REFUSED[kind](mark))
    assert code in {1, 2}, text
    assert mark not in text
    assert "environment" in text or kind == "misspelt option"
    assert sorted(stage.home.glob("*")) == before
    assert not (stage.path / "i.yaml").exists()


def test_everything_is_private_although_the_umask_is_0(trained: Stage) -> None:
    paths = [*trained.home.rglob("*"), trained.home, *trained.cache.rglob("*")]
    assert len(paths) > 30
    wrong = {
        str(path): oct(mode)
        for path in paths
        if (mode := stat.S_IMODE(path.lstat().st_mode)) != (0o700 if path.is_dir() else 0o600)
        and not path.is_symlink()
        and trained.cache / "probe" not in (path, *path.parents)  # copied there by the test
    }
    assert wrong == {}


def test_a_page_that_the_user_names_follows_the_umask(trained: Stage) -> None:
    before = os.umask(0o027)
    try:
        code, text = trained.call("report", "told", "--html", "page.html")
    finally:
        os.umask(before)
    assert code == 0, text
    assert stat.S_IMODE((trained.path / "page.html").stat().st_mode) == 0o640
    assert marks_in((trained.path / "page.html").read_bytes()) == []


def attempts_of(uid: int, paths: Sequence[Path], pids: Sequence[int]) -> dict[str, list[str]]:
    """What another user succeeds in, tried in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            result = json.load(pipe)
        os.waitpid(child, 0)
        return result
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        result = {"read": [], "written": [], "locked": [], "listed": [], "changed": [], "ended": []}
        for path in paths:
            for name, attempt in ATTEMPTS.items():
                with suppress(OSError):
                    attempt(path)
                    result[name].append(str(path))
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, 0)
                result["ended"].append(str(pid))
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
    finally:
        os._exit(0)


def lock(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def change(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.taken"))


ATTEMPTS: dict[str, Callable[[Path], Any]] = {
    "read": Path.read_bytes,
    "written": lambda path: os.open(path, os.O_WRONLY),
    "locked": lock,
    "listed": lambda path: list(path.iterdir()),
    "changed": change,
}


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # the child only tries files
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_locks_and_ends_nothing(trained: Stage) -> None:
    study = StudyDir(trained.home / "studies" / "mine")
    create_records(
        study,
        StudyRequest(
            id="1", name="mine", metrics=("loss",), directions=("minimize",), created_at=0.0
        ),
    )
    control = trained.path / "control"
    control.write_text("everybody's")
    with only_service(trained.home) as pool, study.locked_by_runner():
        pool.write_settings(PoolSettings())
        pool.append_decisions([{"run": "one"}])
        pool.publish({"nodes": []})
        paths = [trained.home, *trained.home.rglob("*"), trained.cache / "probe" / "x.lock"]
        names = {path.name for path in paths}
        assert {"worker.lock", "launch.lock", "service.lock", "runner.lock", "job.json",
                "worker_group.json", "index.sqlite", "study.sqlite3"} <= names  # fmt: skip
        result = attempts_of(NOBODY, [*paths, control], [os.getpid()])
    assert result.pop("read") == [str(control)]  # the attempt itself works
    assert result.pop("locked") == [str(control)]
    assert result == {"written": [], "listed": [], "changed": [], "ended": []}


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # the child only tries files
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_are_closed_even_where_somebody_opened_the_directories(trained: Stage) -> None:
    directories = [path for path in (trained.home, *trained.home.rglob("*")) if path.is_dir()]
    for path in directories:
        path.chmod(0o755)
    try:
        files = [path for path in trained.home.rglob("*") if path.is_file()]
        result = attempts_of(NOBODY, files, [])
    finally:
        for path in directories:
            path.chmod(0o700)
    assert {name for name, paths in result.items() if paths} == set()


def test_a_home_that_others_can_write_to_is_refused_by_the_command(stage: Stage) -> None:
    home = stage.path / "open"
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    before = stage.environment
    stage.environment = {**before, "YUNLU_HOME": str(home)}
    try:
        for arguments in (("ps",), ("train", "told.yaml"), ("pool", "up")):
            code, text = stage.call(*arguments)
            assert code == 1, text
            assert f"chmod 700 {home}" in " ".join(text.split())
    finally:
        stage.environment = before
    assert list(home.iterdir()) == []
