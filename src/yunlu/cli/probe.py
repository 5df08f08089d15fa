"""``yunlu probe``: measure this machine, so that plans for it come true."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from yunlu.core.errors import YunluError
from yunlu.core.settings import worker_environment
from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.executors.worker_process import require_training
from yunlu.jobs import calibration as known
from yunlu.planning.machine_profile import MachineProfile
from yunlu.render.terminal.page import ACCENT, indented, make_console, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from yunlu.planning.calibration import Calibration
    from yunlu.planning.machine_profile import KernelTiming

_PROGRAM = (sys.executable, "-m", "yunlu.training.probing.measure")
_LAST_WORDS_S = 2.0
_WORDS = {
    "product": "matrix products",
    "convolution": "convolutions",
    "convolution_back": "their gradients",
    "attention": "attention",
    "stream": "sums, copies",
    "function": "functions (gelu)",
    "random": "drawn numbers",
    "update": "Adam's update",
}
_COMPUTED = ("product", "convolution", "convolution_back", "attention")


class ProbeError(YunluError):
    """The machine could not be measured."""

    code = "probe"


def probe(
    *,
    show: bool = False,
    afresh: bool = False,
    forget: bool = False,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Measure this machine in under a minute: arithmetic, memory, links, disk, start.

    What is stored already for this machine, torch and number of threads is shown, not measured again.

    Args:
        show: Show what is stored, and what runs have taught; measure nothing.
        afresh: Measure again, though there are figures.
        forget: Drop what deleted runs have taught about this machine.
        all_: With --forget: drop every lesson and every probe.
        json_: Print the figures as JSON.
    """
    console = make_console()
    if all_ and not forget:
        raise ProbeError("--all says what to forget", hint="yunlu probe --forget --all")
    if forget:
        count = known.forget_all() if all_ else known.forget_deleted()
        _say_forgotten(count, console, all_=all_, json_=json_)
        return 0
    probed = known.stored_probe()
    if show and probed is None:
        raise ProbeError("this machine was never probed", hint="yunlu probe")
    is_known = probed is not None and not probed.is_quick and known.knows_threads(probed)
    if not show and (afresh or not is_known):
        require_training()
        # On the way to a file or a pipe, standard output carries the answer alone.
        probed = measure(Console(stderr=True, highlight=False))
    assert probed is not None
    taught = known.read_calibration(refresh=True)
    if json_:
        belief = taught.belief(probed.name)
        learnt = {"runs": belief.runs, "factor": belief.factor, "sd_of_log": belief.sd}
        both = {"probed": probed.model_dump(mode="json"), "calibration": learnt}
        print(json.dumps(both, ensure_ascii=False, indent=2))
    else:
        console.print(_page(probed, taught))
    return 0


def measure(console: Console) -> MachineProfile:
    """Let the training room measure, with a bar that shows how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        for said in _listen():
            if "probed" in said:
                return MachineProfile.model_validate(said["probed"])
            progress.update(
                bar, description=said["part"], completed=said["place"], total=said["of"]
            )
    raise AssertionError("unreachable")


def _listen() -> Iterator[dict[str, Any]]:
    """What the measuring process says, line by line; torch is imported there, not here."""
    with subprocess.Popen(  # noqa: S603 - our own module
        _PROGRAM,
        stdin=subprocess.PIPE,  # should we be killed, it is closed, and the other one ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=worker_environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            words = process.stderr.read().strip().splitlines()
            raise ProbeError(
                f"the machine could not be measured: {words[-1] if words else 'no message'}",
                hint="yunlu doctor tells what is missing",
            )
        finally:
            process.terminate()
            try:
                process.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _say_forgotten(count: int, console: Console, *, all_: bool, json_: bool) -> None:
    if json_:
        print(json.dumps({"forgotten": count}))
    else:
        what = f"run{'s' if count != 1 else ''}"
        words = f"{what} and every probe" if all_ else f"deleted {what}"
        console.print(f" {count} {words} forgotten")


def _page(probed: MachineProfile, taught: Calibration) -> RenderableType:
    when = datetime.fromtimestamp(probed.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    quick = ", in a hurry (`yunlu probe` measures it all)" if probed.is_quick else ""
    title = Text.assemble(
        "\n ",
        (probed.name, f"bold {ACCENT}"),
        (f"  {probed.host} · torch {probed.torch} · {when}", "dim"),
        (f" · took {show_duration(probed.took_s)}{quick}", "dim"),
        "\n",
    )
    return Group(title, indented(_paces(probed)), "", *_facts(probed), _lesson(probed, taught), "")


def _paces(probed: MachineProfile) -> RenderableType:
    table = plain_table()
    table.add_column("")
    for name in ("precision", "threads", "small", "medium", "large", "spread"):
        table.add_column(name, justify="right")
    for pace in probed.paces:
        threads = str(pace.threads) if probed.kind == "cpu" else "–"
        low, middle, high = (_rate(pace, i) for i in (0, len(pace.sizes) // 2, -1))
        spread = f"{pace.spread:.0%}"
        table.add_row(_WORDS[pace.kind], pace.precision, threads, low, middle, high, spread)
    return table


def _rate(pace: KernelTiming, place: int) -> str:
    rate = pace.sizes[place] / pace.seconds[place]
    return f"{show_count(rate)}FLOP/s" if pace.kind in _COMPUTED else f"{show_bytes(rate)}/s"


def _facts(probed: MachineProfile) -> Iterator[Text]:
    rows = {
        "memory": f"{show_bytes(probed.memory_bytes)}, {show_bytes(probed.memory_bytes_per_s)}/s",
        "operator": f"{show_duration(probed.call_s)} a call; in a model × {probed.mixed:.2f}, "
        f"convolutions × {probed.mixed_convolutions:.2f}",
    }
    if (link := probed.link) is not None:
        for name, found in (("all-reduce", link.all_reduce), ("send", link.send)):
            rows[name] = (
                f"{show_duration(found.message_s)} + bytes at {show_bytes(found.bytes_per_s)}/s, "
                f"two workers over {link.backend}"
            )
    if (disk := probed.disk) is not None:
        read, write = show_bytes(disk.read_bytes_per_s), show_bytes(disk.write_bytes_per_s)
        rows["disk"] = f"reads {read}/s, writes {write}/s"
    if (start := probed.start) is not None:
        rows["start"] = (
            f"torch after {show_duration(start.torch_s)}, a worker after "
            f"{show_duration(start.worker_s)} ({show_duration(start.cpu_s)} computing), "
            f"{show_bytes(start.resident_bytes)}"
        )
    for name, words in rows.items():
        yield Text.assemble((f" {name:<12}", "dim"), words)


def _lesson(probed: MachineProfile, taught: Calibration) -> Text:
    belief = taught.belief(probed.name)
    if not belief.runs:
        words = "no run yet: predictions come from these figures alone"
    else:
        few = f"{belief.runs} run" + ("s" if belief.runs > 1 else "")
        words = f"{few}: steps take × {belief.factor:.2f} of what these figures say, "
        words += f"known to ± {belief.sd:.0%}"
    return Text.assemble((f" {'learnt':<12}", "dim"), words)
