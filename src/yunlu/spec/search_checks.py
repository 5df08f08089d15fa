"""Consistency checks between the search and the rest of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from yunlu.core.errors import JobError, did_you_mean, nearest
from yunlu.spec.overrides import field_value, lay_fields
from yunlu.spec.schema import (
    ValidationFinding,
    explain,
    homes_of,
    known_paths,
    schema_at,
    show_value,
)
from yunlu.spec.search import (
    SearchSpec,
    UnclearConstraintError,
    decode_value,
    encode_value,
    read_constraint,
)
from yunlu.spec.source import Path, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.spec.job import Job
    from yunlu.spec.search import DimensionSpec


def find_faults(job: Job) -> list[ValidationFinding]:
    """What is wrong with the job's search; nothing where it has none."""
    if job.search is None:
        return []
    search = job.search
    faults = [fault for name in search.space for fault in _unknown_field(job, name)]
    faults += [fault for name in search.space for fault in _bad_when(search, name)]
    if not faults:  # values are judged only where the fields are known
        faults += [fault for name in search.space for fault in _refused_values(job, name)]
    # A field that is misspelt in the space is not also missed in a constraint.
    known = job if not faults else None
    for index, text in enumerate(search.constraints):
        faults += _bad_constraint(known, search, index, text)
    return [*faults, *_bad_first(search)]


def parents_first(search: SearchSpec) -> list[str]:
    """The fields in the order of the file, but each after those it depends on; loops are cut."""
    ordered: list[str] = []

    def add(name: str, below: tuple[str, ...]) -> None:
        if name in ordered or name in below or name not in search.space:
            return
        for parent in search.space[name].when:
            add(parent, (*below, name))
        ordered.append(name)

    for name in search.space:
        add(name, ())
    return ordered


def wanted_values(spec: DimensionSpec, parent: str) -> list[Any]:
    """The encoded values of the parent at which the dimension exists."""
    wanted: Any = spec.when[parent]
    values = cast("list[Any]", wanted) if isinstance(wanted, list) else [wanted]
    return [encode_value(value) for value in values]


def is_inside(spec: DimensionSpec, value: Any) -> bool:
    """Whether a plain value is one that the dimension may take."""
    if spec.choice is not None:
        # Python takes true for 1; a job does not.
        return any(
            c == value and isinstance(c, bool) == isinstance(value, bool) for c in spec.choice
        )
    assert spec.low is not None
    assert spec.high is not None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    step = spec.step or (1 if spec.is_int else None)
    places = (value - spec.low) / step if step else 0.0
    on_grid = abs(places - round(places)) < 1e-9 * max(1.0, abs(places))
    return spec.low <= value <= spec.high and on_grid


def _unknown_field(job: Job, name: str) -> Iterator[ValidationFinding]:
    at: Path = ("search", "space", name)
    path = _path_of(name)
    if path[0] == "search":
        yield ValidationFinding(at, "a search cannot vary itself", at_key=True)
    elif path == ("name",):
        yield ValidationFinding(at, "trials are named after their study", at_key=True)
    elif schema_at(path) is None or not _has_item(job, path):
        yield ValidationFinding(at, f"unknown field; {_guess(name)}", at_key=True)


def _path_of(name: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def _has_item(job: Job, path: Path) -> bool:
    if not isinstance(path[-1], int):
        return True
    try:
        return path[-1] < len(field_value(job, show_dotted(path[:-1])))
    except (KeyError, TypeError):
        return False


def show_dotted(path: Path) -> str:
    """``train.optimizer.betas.0``."""
    return ".".join(str(part) for part in path)


def _guess(name: str) -> str:
    known = [show_dotted(path) for path in known_paths() if path[0] != "search"]
    homes = [show_path(path) for path in homes_of(name.rpartition(".")[2]) if path[0] != "search"]
    guess = nearest(name, known) or (homes[0] if homes else None)
    if guess:
        return f"did you mean {guess!r}?"
    return "expected one such as train.optimizer.lr, or model.args.NAME for the model's arguments"


def _bad_when(search: SearchSpec, name: str) -> Iterator[ValidationFinding]:
    spec = search.space[name]
    for parent in spec.when:
        at: Path = ("search", "space", name, "when", parent)
        above = search.space.get(parent)
        if above is None:
            guess = nearest(parent, [other for other in search.space if other != name])
            hint = f"did you mean {guess!r}?" if guess else "add it to the space, or leave this out"
            yield ValidationFinding(
                at, f"depends on {parent}, which does not vary; {hint}", at_key=True
            )
            continue
        if above.choice is None and not above.is_int and above.step is None:
            text = f"depends on {parent}, which may be any number; give that a list or a step"
            yield ValidationFinding(at, text, at_key=True)
            continue
        for value in wanted_values(spec, parent):
            if not is_inside(above, decode_value(above, value)):
                text = f"{show_value(value)} is no value that {parent} takes in this search"
                yield ValidationFinding(at, text)
        if _depends_on_itself(search, name):
            yield ValidationFinding(at, "depends on itself in the end", at_key=True)


def _depends_on_itself(search: SearchSpec, name: str) -> bool:
    todo, seen = list(search.space[name].when), set[str]()
    while todo:
        parent = todo.pop()
        if parent == name:
            return True
        if parent in search.space and parent not in seen:
            seen.add(parent)
            todo += search.space[parent].when
    return False


def _refused_values(job: Job, name: str) -> Iterator[ValidationFinding]:
    """Values that the job itself would refuse, each choice or both ends of the range."""
    search = cast("SearchSpec", job.search)
    spec = search.space[name]
    values = spec.choice if spec.choice is not None else [spec.low, spec.high]
    for index, value in enumerate(values):
        part = ("choice", index) if spec.choice is not None else (("low", "high")[index],)
        if text := _refusal(job, {**_above(search, name), name: value}):
            yield ValidationFinding(("search", "space", name, *part), text)
            return


def _above(search: SearchSpec, name: str) -> dict[str, Any]:
    """Values of the fields that this one depends on, at which it exists."""
    values: dict[str, Any] = {}
    for parent in search.space[name].when:
        wanted = wanted_values(search.space[name], parent)[0]
        values |= {**_above(search, parent), parent: decode_value(search.space[parent], wanted)}
    return values


def _refusal(job: Job, values: dict[str, Any]) -> str | None:
    """Why no setting with the last of these values can be right; None where one may be."""
    name = list(values)[-1]
    try:
        lay_fields(job, values)
    except JobError as error:
        return error.message.removeprefix(f"{name}: ")
    except ValidationError as error:
        # Two fields that contradict each other: a setting with other values may be right.
        if all(fault["type"] == "conflict" for fault in error.errors()):
            return None
        return explain(error)[0].message
    return None


def _bad_first(search: SearchSpec) -> Iterator[ValidationFinding]:
    for index, setting in enumerate(search.first):
        if failed := _failed_constraint(search, setting):
            yield ValidationFinding(
                ("search", "first", index), f"does not fulfil {show_value(failed)}"
            )
        for name, value in setting.items():
            at: Path = ("search", "first", index, name)
            spec = search.space.get(name)
            if spec is None:
                text = f"{name} does not vary in this search; {did_you_mean(name, search.space)}"
                yield ValidationFinding(at, text, at_key=True)
            elif not is_inside(spec, value):
                yield ValidationFinding(
                    at, f"{show_value(value)} lies outside of search.space.{name}"
                )


def _failed_constraint(search: SearchSpec, setting: dict[str, Any]) -> str | None:
    for text in search.constraints:
        try:
            if not read_constraint(text).holds(setting):
                return text
        except UnclearConstraintError:
            continue  # said where it stands
    return None


def _bad_constraint(
    job: Job | None, search: SearchSpec, index: int, text: str
) -> Iterator[ValidationFinding]:
    at: Path = ("search", "constraints", index)
    try:
        constraint = read_constraint(text)
    except UnclearConstraintError as error:
        yield ValidationFinding(at, f"{show_value(text)} {error}")
        return
    for name in constraint.names:
        if name in search.space:
            continue
        if schema_at(_path_of(name)) is None:
            known = [*search.space, *(show_dotted(path) for path in known_paths())]
            guess = nearest(name, known)
            hint = f"; did you mean {guess!r}?" if guess else ""
            yield ValidationFinding(at, f"{show_value(text)} names {name}, which is no field{hint}")
        elif job is not None and not _says(job, name):
            parts = f"{show_value(text)} names {name}, of which the job says nothing; set it, or let it vary"
            yield ValidationFinding(at, parts)


def _says(job: Job, name: str) -> bool:
    try:
        return field_value(job, name) not in (None, "auto")
    except KeyError:
        return False
