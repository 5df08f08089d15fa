"""TensorBoard event files in the run's own directory (``tensorboard --logdir yunlu-runs``).

Importing ``torch.utils.tensorboard`` costs several tenths of a second for a few hundred bytes of
output. An event file is a sequence of framed protocol buffers, so only those are imported here, with
the first record.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.core.files import make_directory, open_private
from yunlu.runs.run_store import Area, require_local
from yunlu.training.trackers.tracker import public_config

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


class TensorBoardTracker:
    """Writes one event file per attempt; a resumed attempt continues from its first step."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._proto: Any = None
        self._run: RunStore | None = None
        self._config: dict[str, Any] = {}
        self._resumed = False

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Prepare; the file is created with the first metrics."""
        self._run, self._resumed, self._config = run, resumed, public_config(job)

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Write the numbers of one step as one record."""
        if self._file is None:
            self._open(step)
        summary = self._proto.Summary
        values = [summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._write(step=step, summary=summary(value=values))

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Close the file; every record is already in it."""
        del state, summary  # TensorBoard cannot store either
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, first_step: int) -> None:
        assert self._run is not None, "start comes before log"
        self._proto = _load_protos()
        directory = require_local(self._run).directory(Area.TENSORBOARD)
        make_directory(directory)
        earlier = sorted(directory.glob("events.out.tfevents.*"))
        # Unbuffered: a record is in the file as soon as it is logged, so a crash loses none.
        self._file = open_private(_path_after(earlier, directory), "wb", buffering=0)
        self._write(file_version="brain.Event:2")
        if self._resumed or earlier:
            # Readers drop what a crashed attempt logged from this step on.
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._write(step=first_step, session_log=start)
        else:
            self._write_text("job", self._config)

    def _write_text(self, tag: str, content: dict[str, Any]) -> None:
        proto = self._proto
        text = "```json\n" + json.dumps(content, indent=2, ensure_ascii=False) + "\n```"
        plugin = proto.SummaryMetadata.PluginData(plugin_name="text")
        value = proto.Summary.Value(
            tag=f"{tag}/text_summary",
            metadata=proto.SummaryMetadata(plugin_data=plugin),
            tensor=proto.TensorProto(
                dtype="DT_STRING",
                string_val=[text.encode()],
                tensor_shape=proto.TensorShapeProto(dim=[proto.TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._write(step=0, summary=proto.Summary(value=[value]))

    def _write(self, **fields: Any) -> None:
        assert self._file is not None
        event = self._proto.Event(wall_time=time.time(), **fields)
        data = frame(event.SerializeToString())
        while data:
            data = data[self._file.write(data) :]


def frame(data: bytes) -> bytes:
    """One record of an event file: length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Masked CRC-32C, as the format requires."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli), reflected polynomial 0x82F63B78."""
    table: list[int] = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)  # noqa: PLW2901 (a shift register)
        table.append(crc)
    return tuple(table)


def _path_after(earlier: list[Path], directory: Path) -> Path:
    """A name that sorts after those of earlier attempts: readers sort event files by name."""
    second = int(time.time())
    if earlier:  # the clock may have gone back, or two attempts began within one second
        second = max(second, int(earlier[-1].name.split(".")[3]))
    return directory / f"events.out.tfevents.{second:010d}.{len(earlier):04d}.{_host()}"


def _host() -> str:
    return socket.gethostname().split(".")[0] or "localhost"


def _load_protos() -> SimpleNamespace:
    """TensorBoard's generated message classes, without the rest of TensorBoard."""
    try:
        modules = {
            name: import_module(f"tensorboard.compat.proto.{name}_pb2") for name in _PROTOS.values()
        }
    except ImportError as error:
        raise missing_part("tensorboard", "train", "Logging to TensorBoard") from error
    return SimpleNamespace(
        **{message: getattr(modules[name], message) for message, name in _PROTOS.items()}
    )


_PROTOS = {
    "Event": "event",
    "SessionLog": "event",
    "Summary": "summary",
    "SummaryMetadata": "summary",
    "TensorProto": "tensor",
    "TensorShapeProto": "tensor_shape",
}
