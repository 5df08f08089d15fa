"""Text and runs that somebody made to do harm: the corpus of these tests."""

from __future__ import annotations

import json
import re
import types
import unicodedata
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from tests.sample_events import sample_plan
from yunlu.runs.events import KnownEvent, StateChanged, to_record
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Document, Log
from yunlu.runs.states import RunState

PAYLOADS = {
    "OSC 52 clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "OSC 52 with ST": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "OSC 0 title": "\x1b]0;owned\x07",
    "OSC 8 link": "\x1b]8;;http://evil.example/\x1b\\click\x1b]8;;\x1b\\",
    "OSC 9 notification": "\x1b]9;owned\x07",
    "OSC 1337 file": "\x1b]1337;File=name=YQ==;inline=1:YQ==\x07",
    "OSC 10 colour": "\x1b]10;#000000\x07",
    "clear screen": "\x1b[2J\x1b[H",
    "clear line": "\x1b[2K",
    "cursor up": "\x1b[3A",
    "scroll region": "\x1b[1;2r",
    "colour": "\x1b[31;1m",
    "conceal": "\x1b[8m",
    "alternate screen": "\x1b[?1049h",
    "bracketed paste": "\x1b[?2004h",
    "window report": "\x1b[21t",
    "device attributes": "\x1b[c",
    "cursor report": "\x1b[6n",
    "DCS": "\x1bP$qm\x1b\\",
    "APC": "\x1b_payload\x1b\\",
    "PM": "\x1b^payload\x1b\\",
    "reset": "\x1bc",
    "charset": "\x1b(0",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d0;owned\x9c",
    "C1 DCS": "\x90q\x9c",
    "next line": "one\x85two",
    "bell": "\x07",
    "backspace": "safe\x08\x08\x08\x08evil",
    "carriage return": "error\rfine ",
    "vertical tab and form feed": "a\x0bb\x0cc",
    "shift out": "\x0eabc\x0f",
    "NUL and DEL": "a\x00b\x7fc",
    "right-to-left override": "\u202egnp.exe",
    "isolates": "\u2066a\u2069\u2067b\u2069",
    "bidirectional marks": "\u200ea\u200fb\u061cc",
    "line separators": "a\u2028b\u2029c",
    "annotation": "\ufff9a\ufffab\ufffb",
    "tags": "\U000e0041\U000e0042",
    "markup of Rich": "[link=http://evil.example]x[/link][/nothing][bold",
    "markup of pages": "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "templates": "{{ 7*7 }}{% raw %}${7*7}",
}
"""Without newlines and lone surrogates: those that no JSON document of ours can hold are apart."""
SURROGATE = "a\ud800b"
ALL = "¦".join(PAYLOADS.values())

_SGR = re.compile(r"\x1b\[[0-9;]*m")
_REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
_MARKS = set("\u200e\u200f\u061c\ufff9\ufffa\ufffb")


def control_sequences(text: str, *, colours: bool = True) -> set[str]:
    """Characters that steer a terminal or reorder text; colours are those that Rich itself writes."""
    text = _SGR.sub("", text) if colours else text
    return {
        letter
        for letter in text
        if (unicodedata.category(letter) in {"Cc", "Cs", "Zl", "Zp"} and letter not in "\n\t")
        or unicodedata.bidirectional(letter) in _REORDERING
        or letter in _MARKS
        or 0xE0000 <= ord(letter) <= 0xE007F
    }


def fill(kind: Any, text: str) -> Any:  # noqa: PLR0911 (a case for each kind of type)
    """A value of a type in which every string, and every key, is this text."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        return fill(next(item for item in arguments if item is not type(None)), text)
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        items = arguments[:1] if arguments[-1:] == (...,) else arguments
        return [fill(item, text) for item in items]
    if origin is dict:
        return {fill(arguments[0], text): fill(arguments[1], text)}
    if origin is not None:  # Annotated
        return fill(arguments[0], text)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {
            name: fill(field.annotation, text)
            for name, field in kind.model_fields.items()
            if name not in {"at", "v"}
        }
    return {int: 1, float: 1.0, bool: True, type(None): None}.get(kind, text)


def hostile_events(text: str) -> list[dict[str, Any]]:
    """One event of every kind."""
    kinds = get_args(KnownEvent)
    plan = json.loads(sample_plan().model_dump_json())
    plan |= {
        "stopping_metric": text,
        "best_metric": text,
        "choices": [{"name": text, "value": text, "reason": text}],
    }
    events: list[dict[str, Any]] = []
    for kind in kinds:
        if kind is StateChanged:
            continue
        record = fill(kind, text) | {"v": 1, "at": 2.0}
        events.append(record | ({"plan": plan} if "plan" in record else {}))
    return events


def make_hostile_run(
    home: Path, text: str, *, name: str = "evil-000000", ends: str = "failed"
) -> Path:
    """A run in which every stored string is this text, as far as a string may be anything."""
    path = home / name
    path.mkdir(parents=True)
    run = open_run(path)
    model = {"name": text, "args": {text: text}}
    job = {"name": text, "task": text, "model": model, "data": {"train": text, "target": text}}
    run.write(Document.JOB, json.dumps(job))
    run.write(Document.JOB_SOURCE, text)
    states = [
        StateChanged(state=state, reason=text, directory=text, at=1.0)
        for state in (RunState.PENDING, RunState.PLANNING, RunState.RUNNING)
    ]
    run.append(Log.EVENTS, [to_record(state) for state in states])
    run.append(Log.EVENTS, hostile_events(text))
    run.append(Log.EVENTS, [{"v": 9, "kind": text, "at": 2.0, text: {text: [text]}}])
    if ends:
        run.append(Log.EVENTS, [to_record(StateChanged(state=RunState(ends), reason=text, at=3.0))])
    metrics = {"step": 1, "at": 2.0, "loss": 1.0, "lr": 0.1, "epoch": 1.0, text: 1.0}
    run.append(Log.METRICS, [metrics, metrics | {"step": 2, "at": 3.0}])
    run.append(Log.RANK_METRICS, [{"rank": 0, "worker": text, "at": 2.0, "step": 1, text: 1.0}])
    run.append(
        Log.LEASE_EVENTS, [{"at": 1.0, "lease": text, "node": text, "what": text, "reason": text}]
    )
    (path / WORKER_LOG).write_text(f"{text}\n{text}\n", errors="surrogatepass")
    (path / "logs").mkdir()
    (path / "logs" / "worker-0.log").write_text(f"{text}\n", errors="surrogatepass")
    run.write(Document.REPORT_PAGE, text)
    run.write(Document.QUEUE_ENTRY, json.dumps(queue_entry(text)))
    return path


def queue_entry(text: str) -> dict[str, Any]:
    """A place in the queue of the pool."""
    return {
        "submitted_at": 1.0,
        "team": text,
        "signature": text,
        "request": {"least": 1, "most": 1, "requested": 1},
    }
