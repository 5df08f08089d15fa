"""Real bytes through hosts with limited links, and nothing left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.netrig import Rig, RigError, links, why_no_rig

from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.network_rig

_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as door:
    print("ready", flush=True)
    link, _ = door.accept()
    got = 0
    while data := link.recv(1 << 20):
        got += len(data)
    print(got, flush=True)
"""
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], 7000), timeout=120)
began_at = time.monotonic()
link.sendall(bytes(int(sys.argv[2])))
link.shutdown(socket.SHUT_WR)
link.recv(1)
print(time.monotonic() - began_at)
"""
_HOLD = """
import signal, sys
from benchmarks.netrig import Rig
# Whoever is started in the background has Ctrl-C ignored, and leaves it so to us.
signal.signal(signal.SIGINT, signal.default_int_handler)
with Rig(2, prefix=sys.argv[1]) as rig:
    child = rig.run(0, ["sleep", "600"])
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    reason = why_no_rig()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"yq{os.getpid() % 10_000}{abs(hash(request.node.name)) % 100}"


def _leftovers(prefix: str) -> list[str]:
    interfaces = [name for _, name in socket.if_nameindex() if name.startswith(prefix)]
    return interfaces + [path.name for path in Path("/run/netns").glob(f"{prefix}*")]


def _transfer(rig: Rig, length: int) -> float:
    """Seconds that host 1 takes to send to host 0."""
    receiver = rig.run(
        0, [sys.executable, "-c", _RECEIVE, rig.address(0)], stdout=subprocess.PIPE, text=True
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = rig.run(
            1,
            [sys.executable, "-c", _SEND, rig.address(0), str(length)],
            stdout=subprocess.PIPE,
            text=True,
        )
        took, _ = sender.communicate(timeout=LIMIT_S)
        assert receiver.stdout.readline() == f"{length}\n"
    return float(took)


def test_bytes_are_counted_and_limited(prefix: str) -> None:
    length = 500_000
    with Rig(3, rate="8mbit", prefix=prefix) as rig:
        before = rig.count_all()
        took_s = _transfer(rig, length)
        receiver, sender, idle = (
            now - then for now, then in zip(rig.count_all(), before, strict=True)
        )
        assert length <= sender.sent_bytes < 1.1 * length
        assert length <= receiver.received_bytes < 1.1 * length
        assert receiver.sent_bytes < 0.1 * length
        assert idle.sent_bytes < 1000
        # A token bucket lets nothing through before its time, on however slow a machine.
        assert took_s > 0.9 * (length - 2 * 16_384) * 8 / 8e6
    assert _leftovers(prefix) == []


def test_a_direction_of_one_host_is_limited_and_freed(prefix: str) -> None:
    with Rig(2, prefix=prefix) as rig:
        rig.rate(1, "20mbit", "up")
        rig.rate(1, "10mbit", "down")
        assert links.list_limits(prefix, 1) == {"up": "20Mbit", "down": "10Mbit"}
        assert links.list_limits(prefix, 0) == {"up": "none", "down": "none"}
        rig.rate(1, "5mbit", "up")
        assert links.list_limits(prefix, 1) == {"up": "5Mbit", "down": "10Mbit"}
        rig.rate(None, "none")
        assert links.list_limits(prefix, 1) == {"up": "none", "down": "none"}


def test_two_rigs_live_side_by_side() -> None:
    with Rig(2) as first, Rig(2) as second:
        assert first.prefix != second.prefix
        before = second.count(0)
        _transfer(first, 10_000)
        assert (second.count(0) - before).received_bytes < 1000
        assert first.prefix in links.list_rigs()
    assert _leftovers(first.prefix) == _leftovers(second.prefix) == []


def test_an_error_removes_hosts_and_ends_what_runs_on_them(prefix: str) -> None:
    def fail() -> None:
        with Rig(2, prefix=prefix) as rig:
            # In a session of its own, and its parent gone: only the host knows it.
            script = "setsid sleep 600 & echo $!"
            child = rig.run(1, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
            with child:
                assert child.stdout is not None
                pids.append(int(child.stdout.readline()))
                child.stdout.close()
            raise RuntimeError("of the block")

    pids: list[int] = []
    with pytest.raises(RuntimeError, match="of the block"):
        fail()
    assert _leftovers(prefix) == []
    assert not _is_running(pids[0])


def test_a_program_that_has_hardly_begun_is_ended_too(prefix: str) -> None:
    with Rig(1, prefix=prefix) as rig:
        child = rig.run(0, ["sleep", "600"])
    assert child.returncode == -signal.SIGKILL
    assert _leftovers(prefix) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_everything(prefix: str, number: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, prefix],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert _leftovers(prefix) != []
        holder.send_signal(number)
        assert holder.wait(timeout=LIMIT_S) != 0
    assert _leftovers(prefix) == []
    assert not _is_running(pid)


def test_a_pulled_cable_carries_nothing_until_it_is_put_back(prefix: str) -> None:
    call = "import socket, sys; socket.create_connection((sys.argv[1], 7001), timeout=0.3)"
    with Rig(2, prefix=prefix) as rig:
        command = [sys.executable, "-c", call, rig.address(0)]

        def answer() -> str:
            child = rig.run(1, command, stderr=subprocess.PIPE, text=True)
            return child.communicate(timeout=LIMIT_S)[1]

        rig.cut(0)
        assert "timed out" in answer()
        rig.mend(0)
        wait_until(lambda: "ConnectionRefusedError" in answer(), "the cable is back")


def test_a_delay_is_in_every_answer_and_bytes_come_through(prefix: str) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("a cable with a delay needs /dev/net/tun")
    ask = "import socket, sys, time; s = time.monotonic(); "
    ask += (
        "link = socket.socket(); link.connect_ex((sys.argv[1], 7002)); print(time.monotonic() - s)"
    )
    with Rig(2, rate="50mbit", delay_ms=30, prefix=prefix) as rig:
        child = rig.run(
            1, [sys.executable, "-c", ask, rig.address(0)], stdout=subprocess.PIPE, text=True
        )
        assert float(child.communicate(timeout=LIMIT_S)[0]) >= 0.06  # there and back
        before = rig.count(0)
        _transfer(rig, 200_000)
        assert (rig.count(0) - before).received_bytes >= 200_000
    assert _leftovers(prefix) == []


def test_competitors_end_with_their_program(prefix: str) -> None:
    with Rig(1, prefix=prefix) as rig:
        child = rig.run(0, ["sleep", "600"], busy=2)
        wait_until(lambda: len(links.list_processes(prefix, 0)) == 3, "the competitors")
        assert os.sched_getaffinity(child.pid) == {rig.core(0)}
        child.kill()
        child.wait()
        wait_until(lambda: links.list_processes(prefix, 0) == [], "their end")


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda: Rig(0), "0 hosts cannot be made"),
        (lambda: Rig(1, prefix="much-too-long-a-name").__enter__(), "cannot name a rig"),
        (lambda: Rig(2).rate(5, "1mbit"), "no host 5"),
        (lambda: Rig(2).rate(0, "fast"), "'fast' is no rate"),
    ],
)
def test_what_cannot_be_is_refused(ask: Callable[[], Any], reason: str) -> None:
    with pytest.raises(RigError, match=reason):
        ask()


def test_the_command_makes_shows_limits_and_removes(prefix: str) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.netrig", *words, "--prefix", prefix]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        assert call("up", "2", "--rate", "50mbit").stdout.count("50Mbit") == 4
        assert "is up already" in call("up", "2").stderr
        shown = call("rate", "5mbit", "--host", "1", "--direction", "up").stdout
        assert shown.splitlines()[1].split()[2:6] == ["up", "5Mbit", "down", "50Mbit"]
    finally:
        assert call("down").returncode == 0
    assert _leftovers(prefix) == []
    assert "there is no rig" in call("show").stderr


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
