"""What the protection of connections costs between two hosts: with it and without, in turn.

    python benchmarks/secure_links.py [--rate 1gbit] [--width 256] [--layers 4] [--batch 16] [--rounds 5]
    python benchmarks/secure_links.py --recovery [--rounds 5]

Needs root: its hosts are network namespaces. Two workers train a transformer on random tokens and sum
their gradients over a ring: CPU time of a step. With ``--recovery``, an elastic run has a node on each
host; all processes of the second are killed, later it joins again: time to the next step, and from
``yunlu join`` to a step of both. Connections are as they are (TLS 1.3), or plain: the same code without
handshake and records. A ratio is that of the medians of all rounds.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.faults_parts.trials import TRIALS, run_trial
from benchmarks.faults_parts.workload import Workload
from benchmarks.faults_parts.yunlu_contender import Yunlu
from benchmarks.netrig import Rig, why_no_rig

if TYPE_CHECKING:
    from collections.abc import Sequence

PORT = 23_456
SECRET = b"benchmark"
_LIMIT = timedelta(seconds=120)


def main() -> int:
    """Run both kinds in turn, and print their ratio."""
    options = parse()
    if options.rank is not None:
        sys.stdout.write(json.dumps(work(options)) + "\n")
        return 0
    if reason := why_no_rig():
        sys.stderr.write(f"{reason}\n")
        return 1
    results: dict[str, list[dict[str, float]]] = {"tls": [], "plain": []}
    for number in range(options.rounds):
        order = list(results.items())
        for kind, rounds in reversed(order) if number % 2 else order:  # the load may change
            with Rig(2, rate=options.rate, pin=not options.recovery) as rig:
                measure = run_recovery if options.recovery else run_pair
                rounds.append(measure(rig, kind, options))
            load = Path("/proc/loadavg").read_text(encoding="ascii").split()[0]
            sys.stderr.write(f"{number} {kind:6} {rounds[-1]} load {load}\n")
    medians = {
        kind: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for kind, rounds in results.items()
    }
    ratios = {name: medians["tls"][name] / value for name, value in medians["plain"].items()}
    sys.stdout.write(
        json.dumps({"options": vars(options), "medians": medians, "tls/plain": ratios}, indent=2)
    )
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
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recovery", action="store_true", help="time to recover and to join")
    parser.add_argument("--kind", default="tls", choices=("tls", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_pair(rig: Rig, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Both workers of one round; the slower one counts."""
    hosts = [rig.address(0), rig.address(1)]
    workers = [
        rig.run(
            rank,
            command(rank, kind, hosts, options),
            environment={"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [
        json.loads(worker.communicate(timeout=600)[0].splitlines()[-1]) for worker in workers
    ]
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def run_recovery(rig: Rig, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """One elastic run whose second node is killed, and joins again."""
    del options
    with tempfile.TemporaryDirectory(prefix="yunlu-links-") as name:
        directory = Path(name)
        # All processes of a run start with this, also those that workers start.
        lines = (
            f"import sys; sys.path.append({str(ROOT)!r})",
            "from benchmarks.secure_links import unprotect; import yunlu.core.secure_link",
            "unprotect()" if kind == "plain" else "",
        )
        (directory / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
        contender = Yunlu(directory=directory / "trial", workload=Workload(), hosts=rig, nodes=True)
        contender.processes.environment = {
            **contender.processes.environment,
            "PYTHONPATH": f"{directory}:{ROOT / 'src'}",
        }
        outcome = run_trial(
            contender, TRIALS["node killed"], fault="node killed", name=kind, round_number=0
        )
    if outcome.failure is not None or outcome.next_step_s is None or outcome.joined_s is None:
        raise RuntimeError(outcome.failure)
    return {"kill_to_step_s": outcome.next_step_s, "join_to_step_s": outcome.joined_s}


def command(rank: int, kind: str, hosts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Command of one worker."""
    given = ("width", "layers", "batch", "steps")
    numbers = [word for name in given for word in (f"--{name}", str(getattr(options, name)))]
    where = ["--rank", str(rank), "--kind", kind, "--hosts", *hosts]
    return [sys.executable, str(Path(__file__)), *numbers, *where]


def work(options: argparse.Namespace) -> dict[str, float]:
    """Train, and measure seconds and CPU seconds of a step."""
    import torch  # noqa: PLC0415 (only workers)

    from yunlu.training.communication.allreduce import ring_allreduce  # noqa: PLC0415
    from yunlu.training.communication.transport import connect  # noqa: PLC0415
    from yunlu.training.models.transformer import CausalTransformer  # noqa: PLC0415
    from yunlu.training.parallel.group_store import GroupStore, StoreServer  # noqa: PLC0415

    torch.set_num_threads(1)
    if options.kind == "plain":
        unprotect()
    server = StoreServer(options.hosts[0], SECRET, port=PORT) if options.rank == 0 else None
    store = GroupStore((options.hosts[0], PORT), SECRET, timeout=_LIMIT)
    transport = connect(
        store, options.rank, 2, options.hosts[options.rank], secret=SECRET, within_s=120
    )
    model: Any = CausalTransformer(
        vocabulary=1000, max_length=64, width=options.width, layers=options.layers, heads=4
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (options.batch, 65))
    began = cpu = 0.0
    flat = torch.empty(0)
    for step in range(options.steps):
        if step == 2:  # the first two warm caches and connections
            began, cpu = time.perf_counter(), time.process_time()
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
        ring_allreduce(transport, flat, tag=step)
        optimizer.step()
        optimizer.zero_grad()
    counted = options.steps - 2
    result = {
        "step_s": (time.perf_counter() - began) / counted,
        "cpu_s": (time.process_time() - cpu) / counted,
        "bytes": float(flat.nbytes),
    }
    transport.close()
    if server is not None:
        store.wait(["done"])
        server.close()
    else:
        with suppress(torch.distributed.DistNetworkError):  # the server may close before it answers
            store.set("done", "1")
    return result


def unprotect() -> None:
    """Replace links by plain sockets with the same methods."""
    from yunlu.core import secure_link  # noqa: PLC0415

    class Plain(secure_link.SecureLink):
        is_authenticated = property(lambda _: True)  # type: ignore[assignment]
        pending = property(lambda _: False)  # type: ignore[assignment]

        def __init__(self, sock: Any, secret: bytes, *, is_server: bool) -> None:
            super().__init__(sock, secret, is_server=True)  # a server begins without a session
            del is_server

        def handshake(self) -> None:
            return

        def sendmsg(self, views: Any) -> int:
            return self._sock.sendmsg(views)

        def sendall(self, data: Any) -> None:
            self._sock.sendall(data)

        def recv(self, limit: int) -> bytes:
            return self._sock.recv(limit)

        def recv_into(self, into: memoryview) -> int:
            return self._sock.recv_into(into)

        def recvmsg_into(self, buffers: Any) -> tuple[int]:
            return (self._sock.recvmsg_into(buffers)[0],)

    for name, module in list(sys.modules.items()):
        if name.startswith("yunlu.") and hasattr(module, "SecureLink"):
            module.SecureLink = Plain  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
