"""What the protection of connections costs between two hosts: with it and without, in turn.

    python benchmarks/secure_links.py [--rate 1gbit] [--width 256] [--layers 4] [--batch 16] [--rounds 5]
    python benchmarks/secure_links.py --recovery [--cycles 2] [--rounds 5]

Needs root: its hosts are network namespaces. Connections are as they are (TLS 1.3), or plain: the same
code without handshake and records.

Two workers train a transformer on random tokens and sum their gradients over a ring: CPU time of a step.
They have a connection of each kind and use them in turn, two steps at a time in random order: both
kinds meet the same load.

With ``--recovery``, an elastic run has a node on each host. A worker is killed (SIGKILL), then all
processes of the second node, then the node joins again: time and CPU time of all processes to the next
step, and from ``yunlu join`` to a step of both, and how much of it handshakes and certificates took.
Runs of both kinds alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.faults_parts.contenders import ContenderError
from benchmarks.faults_parts.history import next_of_size
from benchmarks.faults_parts.workload import Workload
from benchmarks.faults_parts.yunlu_contender import Yunlu
from benchmarks.netrig import Rig, why_no_rig
from benchmarks.plain_links import PlainLink, cpu_of_handshakes, replace_links
from yunlu.core.secure_link import SecureLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.faults_parts.journal import Step

PORT = 23_456
SECRET = b"benchmark"
KINDS = ("tls", "plain")
HANDSHAKES = "handshakes.log"
_LIMIT = timedelta(seconds=120)
_STEPS_AT_ONCE = 2
_SETTLE_STEPS = 8
_WAIT_S = 240.0
_TICK_HZ = os.sysconf("SC_CLK_TCK")

Samples = dict[str, dict[str, list[float]]]
"""By kind of connection and figure."""


def main() -> int:
    """Measure, and print both kinds beside each other."""
    options = parse()
    if options.rank is not None:
        sys.stdout.write(json.dumps(work(options)) + "\n")
        return 0
    if reason := why_no_rig():
        sys.stderr.write(f"{reason}\n")
        return 1
    samples: Samples = {kind: {} for kind in KINDS}
    for number in range(options.rounds):
        if options.recovery:
            for kind in reversed(KINDS) if number % 2 else KINDS:
                add_samples(samples, {kind: run_recovery(kind, options)}, number)
        else:
            add_samples(samples, run_pair(number, options), number)
    report = {name: compare(samples, name) for name in samples["plain"]}
    sys.stdout.write(json.dumps({"options": vars(options), "figures": report}, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """Options; ``--rank`` is for workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="of each kind and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recovery", action="store_true", help="time to recover and to join")
    parser.add_argument("--cycles", type=int, default=2, help="faults of each kind in a run")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def add_samples(samples: Samples, more: Samples, number: int) -> None:
    """Keep what a round measured, and show it."""
    load = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
    for kind, figures in more.items():
        for name, values in figures.items():
            samples[kind].setdefault(name, []).extend(values)
        medians = {name: round(statistics.median(v), 4) for name, v in figures.items()}
        sys.stderr.write(f"{number} {kind:5} {medians} load {load}\n")


def compare(samples: Samples, name: str) -> dict[str, Any]:
    """One figure of both kinds: medians, ranges, and the medians of ratio and difference, measured in turn."""
    tls, plain = samples["tls"][name], samples["plain"][name]
    pairs = list(zip(tls, plain, strict=True))
    ratios = [round(protected / bare, 4) for protected, bare in pairs if bare]
    return {
        "tls": {"median": statistics.median(tls), "range": [min(tls), max(tls)]},
        "plain": {"median": statistics.median(plain), "range": [min(plain), max(plain)]},
        "tls/plain": statistics.median(ratios) if ratios else None,
        "tls-plain": round(statistics.median(a - b for a, b in pairs), 4),
        "ratios in turn": ratios,
    }


# A step.


def run_pair(number: int, options: argparse.Namespace) -> Samples:
    """Both workers of one round: medians of their steps, the mean of both workers."""
    with Rig(2, rate=options.rate, pin=True) as rig:
        hosts = [rig.address(0), rig.address(1)]
        workers = [
            rig.run(
                rank,
                command(rank, number, hosts, options),
                environment={"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers: list[dict[str, dict[str, list[float]]]] = [
            json.loads(worker.communicate(timeout=600)[0].splitlines()[-1]) for worker in workers
        ]
    return {
        kind: {
            name: [statistics.mean(statistics.median(each[kind][name]) for each in answers)]
            for name in answers[0][kind]
        }
        for kind in KINDS
    }


def command(rank: int, seed: int, hosts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Command of one worker."""
    given = ("width", "layers", "batch", "steps")
    numbers = [word for name in given for word in (f"--{name}", str(getattr(options, name)))]
    where = ["--rank", str(rank), "--seed", str(seed), "--hosts", *hosts]
    return [sys.executable, str(Path(__file__)), *numbers, *where]


def work(options: argparse.Namespace) -> Samples:
    """Train, and measure seconds and CPU seconds of each step."""
    import torch  # noqa: PLC0415 (only workers)

    from yunlu.training.communication.allreduce import ring_allreduce  # noqa: PLC0415
    from yunlu.training.communication.transport import Transport, connect  # noqa: PLC0415
    from yunlu.training.models.transformer import CausalTransformer  # noqa: PLC0415
    from yunlu.training.parallel.group_store import GroupStore, StoreServer  # noqa: PLC0415

    torch.set_num_threads(1)
    server = StoreServer(options.hosts[0], SECRET, port=PORT) if options.rank == 0 else None
    store = GroupStore((options.hosts[0], PORT), SECRET, timeout=_LIMIT)
    transports: dict[str, Transport] = {}
    for kind, link in zip(KINDS, (SecureLink, PlainLink), strict=True):
        replace_links(link)
        transports[kind] = connect(
            store,
            options.rank,
            2,
            options.hosts[options.rank],
            name=kind,
            secret=SECRET,
            within_s=120,
        )
    replace_links(SecureLink)
    model: Any = CausalTransformer(
        vocabulary=1000, max_length=64, width=options.width, layers=options.layers, heads=4
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (options.batch, 65))
    samples: Samples = {kind: {"step_s": [], "cpu_s": []} for kind in KINDS}
    for step, kind in enumerate(order_of_kinds(options.steps, options.seed)):
        began, cpu = time.perf_counter(), time.process_time()
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
        ring_allreduce(transports[kind], flat, tag=step)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2 * _STEPS_AT_ONCE:  # the first ones warm caches and connections
            samples[kind]["step_s"].append(time.perf_counter() - began)
            samples[kind]["cpu_s"].append(time.process_time() - cpu)
    for transport in transports.values():
        transport.close()
    if server is not None:
        store.wait(["done"])
        server.close()
    else:
        with suppress(torch.distributed.DistNetworkError):  # the server may close before it answers
            store.set("done", "1")
    return samples


def order_of_kinds(steps: int, seed: int) -> list[str]:
    """Kind of each step, the same for both workers; both kinds come first once, to warm up."""
    order = random.Random(seed)  # noqa: S311 (an order, not a secret)
    kinds: list[str] = []
    for _ in range(1 + -(-steps // _STEPS_AT_ONCE)):
        for kind in order.sample(KINDS, len(KINDS)):
            kinds += [kind] * _STEPS_AT_ONCE
    return kinds


# Recovery.


def run_recovery(kind: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """One elastic run: workers are killed, the second node is killed and joins again, some times."""
    with (
        Rig(2, rate=options.rate) as rig,
        tempfile.TemporaryDirectory(prefix="yunlu-links-") as name,
    ):
        directory = Path(name)
        # All processes of a run start with this, also those that workers start.
        lines = (
            f"import sys; sys.path.append({str(ROOT)!r})",
            "import benchmarks.plain_links",
            f"benchmarks.plain_links.log_handshakes({str(directory / HANDSHAKES)!r})",
            "benchmarks.plain_links.unprotect()" if kind == "plain" else "",
        )
        (directory / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
        contender = Yunlu(directory=directory / "trial", workload=Workload(), hosts=rig, nodes=True)
        contender.processes.environment = {
            **contender.processes.environment,
            "PYTHONPATH": f"{directory}:{ROOT / 'src'}",
        }
        try:
            contender.start()
            return measure_faults(contender, options.cycles)
        finally:
            contender.end()


def measure_faults(contender: Yunlu, cycles: int) -> dict[str, list[float]]:
    """Wall and CPU seconds from each fault to the next step, and from each join to a step of both."""
    figures: dict[str, list[float]] = {}
    settle(contender, size=2)
    for cycle in range(cycles):
        for name, strike, size in (
            ("worker killed", lambda rank=cycle % 2: contender.kill(rank), 1),
            ("node killed", lambda: contender.kill_node(1), 1),
            ("join", lambda: contender.return_node(1), 2),
        ):
            for figure, seconds in measure_fault(contender, strike, size=size).items():
                figures.setdefault(f"{name}: {figure}", []).append(seconds)
            settle(contender, size=1 if name == "node killed" else 2)
    return figures


def measure_fault(contender: Yunlu, strike: Callable[[], float], *, size: int) -> dict[str, float]:
    """Seconds from a fault to the next step of another group of at least this size."""
    before = cpu_of_processes(contender)
    at = strike()
    contender.journal.refresh()
    group = max(contender.journal.steps, key=lambda step: step.at).group
    step = wait_for(contender, lambda steps: next_of_size(steps, after=at, size=size, group=group))
    after = cpu_of_processes(contender)
    return {
        "wall_s": step.at - at,
        "cpu_s": sum(spent - before.get(pid, 0.0) for pid, spent in after.items()),
        "handshakes_cpu_s": cpu_of_handshakes(
            contender.directory.parent / HANDSHAKES, after=at, until=step.at
        ),
    }


def settle(contender: Yunlu, *, size: int) -> None:
    """Wait until the newest group is of this size and has made some steps."""

    def find(steps: list[Step]) -> Step | None:
        newest = max(steps, key=lambda step: step.at, default=None)
        if newest is None or newest.size != size:
            return None
        made = {step.step for step in steps if step.group == newest.group}
        return newest if len(made) >= _SETTLE_STEPS else None

    wait_for(contender, find)


def wait_for(contender: Yunlu, find: Callable[[list[Step]], Step | None]) -> Step:
    """The step that is looked for, once it is in the journal."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        contender.journal.refresh()
        if (found := find(contender.journal.steps)) is not None:
            return found
        time.sleep(0.01)
    raise ContenderError(f"no such step within {_WAIT_S:.0f} s")


def cpu_of_processes(contender: Yunlu) -> dict[int, float]:
    """CPU seconds of each process of a run so far, without those of children that have ended."""
    spent: dict[int, float] = {}
    for pid in contender.processes.alive():
        with suppress(OSError):  # it ended meanwhile
            fields = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            )
            spent[pid] = (int(fields[11]) + int(fields[12])) / _TICK_HZ
    return spent


if __name__ == "__main__":
    sys.exit(main())
