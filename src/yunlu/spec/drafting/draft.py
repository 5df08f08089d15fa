"""A job as far as another tool's file says it, and what could not be taken over, with the reason."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

import yaml

from yunlu.core.imports import TASKS, known_names
from yunlu.core.secrets import is_secret_name, mask
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Taken, is_unsaid
from yunlu.spec.counterparts.table import by_name
from yunlu.spec.credentials import find_credentials
from yunlu.spec.load import InvalidJobError, job_from_mapping
from yunlu.spec.schema import schema_at
from yunlu.spec.task_traits import traits_of

_ORDER = ("name", "task", "model", "data", "train", "devices", "layout", "trackers", "search")
PLACEHOLDERS = {"task": "TASK", "model.name": "MODEL", "data.train": "DATA"}
"""What a job needs, and what stands for it where the file does not say it."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One thing that the job does not say."""

    what: str
    why: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.what}: {self.why}"


@dataclass(slots=True)
class Draft:
    """Grows while a file is read."""

    source: str
    values: Taken = field(default_factory=dict[str, Any])
    """Our dotted keys."""
    left: list[LeftOut] = field(default_factory=list[LeftOut])
    notes: list[str] = field(default_factory=list[str])
    """What to look at before training."""

    def take(self, key: str, value: Any) -> None:
        """A key of ours; what stands already stays."""
        is_whole = isinstance(value, float) and value.is_integer() and key == "train.epochs"
        self.values.setdefault(key, int(value) if is_whole else value)

    def leave(self, what: str, why: str, line: int | None = None) -> None:
        """Something without a counterpart; each is said once."""
        if all((left_out.what, left_out.why) != (what, why) for left_out in self.left):
            self.left.append(LeftOut(what, why, line))

    def note(self, text: str) -> None:
        """Something to look at, once."""
        if text not in self.notes:
            self.notes.append(text)

    def convert(
        self,
        tool: str,
        settings: Settings,
        *,
        beside: Settings | None = None,
        lines: Settings | None = None,
        within: str = "",
        is_whole: bool = False,
    ) -> None:
        """Take over a tool's arguments by the table.

        ``within`` is the callback or section that they belong to; ``is_whole`` says that the file
        names every argument, so that those at rest are not worth a word.
        """
        if lines is None:
            lines = {}
        if beside is None:
            beside = {}
        rows, around = by_name(tool), {**beside, **settings}
        for name, value in settings.items():
            row = rows.get(f"{within}{name}")
            line = lines.get(name)
            if row is None:
                if not is_whole:
                    self.leave(
                        _shown(name, value), f"not an argument of {tool} that is known here", line
                    )
                continue
            try:
                for key, taken in row.convert(value, around).items():
                    if not (is_whole and _is_default(key, taken)):
                        self.take(key, taken)
            except NotTakenError as reason:
                at_rest = is_unsaid(value) or value in (False, [], {}, 0)
                if not (is_whole and (at_rest or not row.keys)):
                    self.leave(_shown(name, value), str(reason), line)


def write_draft(draft: Draft) -> tuple[str, list[str]]:
    """The text of the job file, and the keys that must be filled in."""
    values = dict(draft.values)
    _drop_credentials(draft, values)
    if values.get("train.precision") in {"fp16", "bf16"}:
        draft.note(
            f"precision {values['train.precision']} is obeyed on every device; auto takes 16 bits only "
            "where they are faster"
        )
    if "task" in values:
        values.setdefault("model.name", traits_of(values["task"]).model)
    missing = [key.partition(".")[0] for key in PLACEHOLDERS if key not in values]
    body = _fitting(draft, {**PLACEHOLDERS, **values}, is_whole=not missing)
    lines = _comment(
        f"Drafted from {draft.source}, which was read and not run. What is not said is chosen by the "
        "plan, with its reason. Look before you train: yunlu validate, yunlu plan."
    )
    for key in missing:
        tasks = f": one of {', '.join(known_names(TASKS))}" if key == "task" else ""
        lines += _comment(f"Fill in {key}, which {draft.source} does not say{tasks}.")
    for note in draft.notes:
        lines += _comment(f"Note: {note}.")
    lines.append(_dump(body).rstrip())
    if draft.left:
        lines += ["", *_comment(f"Not taken over from {draft.source}:")]
        for left_out in sorted(draft.left, key=lambda left_out: left_out.line or 0):
            lines += _comment(f"- {left_out}")
    return "\n".join(lines) + "\n", missing


def _is_default(key: str, value: Any) -> bool:
    schema = schema_at(tuple(key.split("."))) or {}
    return "default" in schema and schema["default"] == value


def _comment(text: str) -> list[str]:
    """Lines of at most 79 columns; nothing of a foreign file may end the comment, or be a secret."""
    plain = "".join(char if char.isprintable() else "?" for char in " ".join(mask(text).split()))
    wrapped = textwrap.wrap(
        plain, 77, break_on_hyphens=False, subsequent_indent="  " if plain.startswith("- ") else ""
    )
    return [f"# {line}" for line in wrapped]


def _drop_credentials(draft: Draft, values: Taken) -> None:
    for finding in list(find_credentials(_nested({**PLACEHOLDERS, **values}))):
        written = ".".join(str(part) for part in finding.path)
        for key in [key for key in values if key.startswith(written) or written.startswith(key)]:
            del values[key]
            draft.leave(key, finding.message)


def _fitting(draft: Draft, values: Taken, *, is_whole: bool) -> dict[str, Any]:
    """The nested job, without what contradicts itself."""
    while True:
        body = _nested(values)
        try:
            job_from_mapping(body if is_whole else {**body, "task": "text-classification"})
        except InvalidJobError as error:
            refused = {
                key: problem.message
                for problem in error.problems
                for key in values.keys() - PLACEHOLDERS.keys()
                if key == problem.key or key.startswith(f"{problem.key}.")
            }
            for key, message in refused.items():
                draft.leave(_shown(key, values.pop(key)), message)
            if refused:
                continue
        return body


def _nested(values: Taken) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for key, value in values.items():
        parts = (
            ("search", "space", key.removeprefix("search.space."))
            if key.startswith("search.space.")
            else tuple(key.split("."))
        )
        section = body
        for part in parts[:-1]:
            section = section.setdefault(part, {})
        section[parts[-1]] = value
    for key, short in (("model", "name"), ("data", "train")):  # the plain form, where it says all
        if isinstance(body.get(key), dict) and body[key].keys() == {short}:
            body[key] = body[key][short]
    return {key: body[key] for key in _ORDER if key in body}


class _Flow(dict[str, Any]):
    """A small section on one line."""


class _Dumper(yaml.SafeDumper):
    """Short lists and small sections on one line, as people write them."""


_Dumper.add_representer(
    _Flow,
    lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True),
)
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def _dump(body: dict[str, Any]) -> str:
    return yaml.dump(
        _tidy(body, 0), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000
    )


def _tidy(value: Any, depth: int) -> Any:
    if not isinstance(value, dict):
        return value
    tidied = {key: _tidy(nested, depth + 1) for key, nested in value.items()}
    is_small = depth > 1 and not any(isinstance(nested, dict) for nested in tidied.values())
    return _Flow(tidied) if is_small else tidied


def _shown(name: str, value: Any) -> str:
    if is_secret_name(name):
        return name
    text = f"{name}={value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
