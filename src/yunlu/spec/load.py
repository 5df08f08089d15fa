"""Load a job from YAML, Python or a mapping, override its values, check it; report every problem at once."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import asdict, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError, field_serializer

from yunlu.core.errors import JobError, YunluError, did_you_mean, nearest
from yunlu.core.imports import CALLBACKS, SAMPLERS, TASKS, TRACKERS, known_names, names_object
from yunlu.core.limits import over_limit, read_limits
from yunlu.core.value import Value
from yunlu.spec.communication import codec_names
from yunlu.spec.credentials import find_credentials
from yunlu.spec.job import SHORTHANDS, SPELLINGS, Job
from yunlu.spec.schema import (
    ValidationFinding,
    explain,
    home_of,
    homes_of,
    known_paths,
    schema_at,
    show_value,
    unknown_name,
)
from yunlu.spec.search import (
    SearchSpec,
    UnclearConstraintError,
    decode_value,
    encode_value,
    read_constraint,
    spell_range,
)
from yunlu.spec.source import (
    InvalidJobError,
    KeyPath,
    Problem,
    SourceDocument,
    SourceLocation,
    parse,
    show_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from yunlu.spec.search import DimensionSpec


def apply_overrides(document: SourceDocument, overrides: Sequence[str]) -> SourceDocument:
    """The document with each ``key=value`` put in place, in order; the value is read as YAML."""
    for override in overrides:
        document = _apply(document, override)
    return document


def lay_fields(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these dotted fields set, and without its search.

    A bare value for a section that takes one (``train.optimizer``) leaves the section's other keys
    as they are. What does not fit raises pydantic's ``ValidationError``.
    """
    data: Any = job.model_dump(mode="json", exclude_unset=True, exclude={"search"})
    for name in sorted(values, key=lambda name: name.count(".")):  # sections before their keys
        path, value = tuple(name.split(".")), values[name]
        if path in SHORTHANDS and isinstance(value, (str, int, float)):
            path = (*path, SHORTHANDS[path])
        elif path[-1].isdecimal():
            path, value = path[:-1], _with_item(job, data, path, value)
        try:
            data = _put(data, path, value)
        except _NoRoom as error:
            raise JobError(f"{name}: {error}.") from None
    return Job.model_validate(data)


def field_value(job: Job, name: str) -> Any:
    """What the job itself says at a dotted field, as plain data; ``KeyError`` where nothing stands."""
    result: Any = job
    for part in name.split("."):
        try:
            if isinstance(result, Value):
                result = getattr(result, part)
            else:
                result = result[int(part) if isinstance(result, (list, tuple)) else part]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise KeyError(name) from None
    return result.model_dump(mode="json") if isinstance(result, Value) else result


def _with_item(job: Job, data: Any, path: tuple[str, ...], value: Any) -> list[Any]:
    """A list of the job with one of its items replaced: ``train.optimizer.betas.0``."""
    result: Any = data
    try:
        for part in path[:-1]:
            result = result[part]
    except (KeyError, TypeError):  # not said: the default
        result = field_value(job, ".".join(path[:-1]))
    items = list(result)
    items[int(path[-1])] = value
    return items


def _apply(document: SourceDocument, override: str) -> SourceDocument:
    key, equals, text = override.partition("=")
    key = key.strip()
    path = _path_of(key, document.data)
    if not equals or not all(path):
        return _with_problems(
            document, key or override, "expected KEY=VALUE, such as train.epochs=3"
        )
    try:
        value = parse(text, where=override)
        data = _put(document.data, path, value.data)
    except InvalidJobError as error:
        return _with_problems(document, key, *(problem.message for problem in error.problems))
    except _NoRoom as error:
        return _with_problems(document, key, str(error))
    index = SourceLocation(override=key)
    # Sections that the override had to create are its own too: a misspelt one is its mistake.
    created = {path[:n]: index for n in range(1, len(path)) if path[:n] not in document.keys}
    below = {(*path, *rest): index for rest in value.values}
    changed = replace(
        document,
        data=data,
        keys={**_without(document.keys, path), **created, **below},
        values={**_without(document.values, path), **created, **below},
    )
    return _with_problems(changed, key, *(problem.message for problem in value.problems))


def _path_of(key: str, data: Any) -> tuple[str, ...]:
    """The way to a key; what follows ``search.space`` is the dotted name of a field, one key."""
    path = tuple(key.split("."))
    if path[:2] != ("search", "space") or len(path) < 4 or not all(path):
        return path
    name = path[2:]
    search = cast("Any", data).get("search") if isinstance(data, dict) else None
    space = search.get("space") if isinstance(search, dict) else None
    for end in range(1, len(name)):
        if isinstance(space, dict) and ".".join(name[:end]) in space:
            return ("search", "space", ".".join(name[:end]), *name[end:])
    return ("search", "space", ".".join(name))


class _NoRoom(Exception):  # noqa: N818 (never leaves this file)
    """A value stands where the override needs a mapping."""


def _put(data: Any, path: tuple[str, ...], value: Any, above: tuple[str, ...] = ()) -> Any:
    """A copy of the data with the value at the path."""
    if not path:
        return value
    if data is None:
        data = {}
    if above in SHORTHANDS and isinstance(data, (str, int, float)):
        data = {SHORTHANDS[above]: data}
    elif spell := _spelling(above, data):
        spelt = spell(cast("str", data))
        data = data if spelt is None else spelt
    elif above[:2] == ("search", "space") and isinstance(data, list):
        data = {"choice": cast("list[Any]", data)}
    if not isinstance(data, dict):
        raise _NoRoom(f"{show_path(above)} is {show_value(data)}, which has no keys; set it whole")
    section = cast("dict[str, Any]", data)
    key, rest = path[0], path[1:]
    return {**section, key: _put(section.get(key), rest, value, (*above, key))}


def _spelling(above: tuple[str, ...], data: Any) -> Callable[[str], dict[str, Any] | None] | None:
    if not isinstance(data, str):
        return None
    is_dimension = above[:2] == ("search", "space") and len(above) == 3
    return spell_range if is_dimension else SPELLINGS.get(above)


def _without(places: dict[KeyPath, SourceLocation], path: KeyPath) -> dict[KeyPath, SourceLocation]:
    return {at: index for at, index in places.items() if at[: len(path)] != path}


def _with_problems(document: SourceDocument, key: str, *messages: str) -> SourceDocument:
    result = tuple(Problem(key=key, message=message, override=key) for message in messages)
    return replace(document, problems=(*document.problems, *result))


def read_python(file: Path, name: str) -> Job:
    """Run the user's file and take the job it calls ``name``."""
    try:
        result = _run(file, name)
    except YunluError:
        raise
    except SyntaxError as error:
        problem = Problem(
            key="", message=f"not valid Python: {error.msg}", line=error.lineno, column=error.offset
        )
        raise InvalidJobError(error.filename or str(file), [problem]) from error
    except ValidationError as error:
        if home_of(error.title) is None:  # a class of the user's own
            raise _failed(file, error) from error
        line = _line_in(file, error)
        problems = [
            Problem(key=show_path(finding.path), message=finding.message, line=line)
            for finding in explain(error)
        ]
        raise InvalidJobError(str(file), problems) from error
    except (Exception, SystemExit) as error:
        raise _failed(file, error) from error
    if not isinstance(result, Job):
        raise JobError(
            f"{file}: {name!r} is {type(result).__name__}; expected a yunlu.Job, "
            "or a function without arguments that returns one."
        )
    return result


def _run(file: Path, name: str) -> Any:
    module_name = f"yunlu_job_{file.stem}"
    spec = spec_from_file_location(module_name, file.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # As with `python file.py`, the file may import its neighbours.
    folder = str(file.parent.absolute())
    sys.path.insert(0, folder)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        if name not in vars(module):
            jobs = [key for key, value in vars(module).items() if isinstance(value, Job)]
            functions = [key for key, value in vars(module).items() if _is_own(value, module_name)]
            raise JobError(f"{file} has no {name!r}; {did_you_mean(name, jobs + functions)}.")
        result = vars(module)[name]
        return result() if callable(result) else result
    finally:
        sys.path.remove(folder)
        del sys.modules[module_name]


def _failed(file: Path, error: BaseException) -> InvalidJobError:
    text = f"{type(error).__name__}: {error}"
    return InvalidJobError(str(file), [Problem(key="", message=text, line=_line_in(file, error))])


def _is_own(value: Any, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


def _line_in(file: Path, error: BaseException) -> int | None:
    """The line of the user's file that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == str(file.absolute())]
    return own[-1] if own else None


_PYTHON = re.compile(r"(?P<file>.+\.py)(?::(?P<name>[A-Za-z_]\w*))?")
_YAML = {".yaml", ".yml", ".json"}


def load_job(path: str | Path, *, overrides: Sequence[str] = ()) -> Job:
    """Read ``job.yaml``, ``job.json``, ``job.py`` or ``jobs.py:name``, with ``a.b=c`` overrides.

    A relative path in the job is looked up from the working directory, then beside the job file.
    """
    where = str(path)
    name = "job"
    if python := _PYTHON.fullmatch(where):
        file, name = Path(python["file"]), python["name"] or name
        _check_file(file)
        data = read_python(file, name).model_dump(mode="json", exclude_unset=True)
        document = SourceDocument(data=data)
    else:
        file = Path(path)
        document = _read_yaml(file)
    job = _validate(apply_overrides(document, overrides), where)
    default_name = _as_name(file.stem if name == "job" else f"{file.stem}-{name}")
    job = job.model_copy(update={"name": job.name or default_name})
    return _beside(job, file.parent)


def source_of(job: str | Path | Job | None) -> Path | None:
    """The file of a job; ``jobs.py:name`` names a job inside a file."""
    if job is None or isinstance(job, Job):
        return None
    return Path(re.sub(r"(?<=\.py):\w+$", "", str(job)))


def job_from_mapping(mapping: Mapping[str, Any], *, where: str = "job") -> Job:
    """The same job, and the same words when it is wrong, for callers that hold plain data."""
    return _validate(SourceDocument(data=dict(mapping)), where)


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise JobError(
            f"{file} is a directory, not a job file.", hint="name the .yaml or .py file inside it"
        )
    if not file.exists():
        raise JobError(
            f"There is no job file {file}.",
            hint="check the path, or write one with: yunlu init TASK DATA",
        )


def _read_yaml(file: Path) -> SourceDocument:
    _check_file(file)
    if file.suffix.lower() not in _YAML:
        raise JobError(f"{file} is not a job file: expected .yaml, .yml, .json or .py.")
    try:
        text = _read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(f"{file} is not UTF-8 text (byte {error.start}).") from None
    except OSError as error:
        raise JobError(f"Cannot read {file}: {error.strerror}.") from error
    if file.suffix.lower() == ".json":
        text = text.replace("\t", " ")  # JSON indents with tabs where YAML may not
    document = parse(text, where=str(file))
    if document.data is None and not document.problems:
        raise JobError(
            f"{file} is empty: a job needs at least task, model and data.",
            hint="yunlu init TASK DATA writes one to start from",
        )
    return document


def _read_bytes(file: Path) -> bytes:
    most = read_limits().job
    with file.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise over_limit(
            f"{file} is larger than {most:,} bytes, the most that is read of a job file.",
            "job",
            file.stat().st_size,
            kind=JobError,
        )
    return content


def _validate(document: SourceDocument, where: str) -> Job:
    problems = list(document.problems)
    job: Job | None = None
    findings: list[ValidationFinding] = []
    if isinstance(document.data, dict):
        try:
            job = Job.model_validate(document.data)
            findings = find_faults(job)
        except ValidationError as error:
            findings = explain(error, document.data)
        findings += _unknown_names(document.data)
    elif not problems:
        got = show_value(document.data)
        findings = [
            ValidationFinding((), f"expected a mapping with task, model and data, got {got}")
        ]
    known = {problem.key for problem in problems}
    result = [document.problem(f.path, f.message, at_key=f.at_key) for f in findings]
    result += _credentials(document)
    # What could not even be read is not also judged.
    problems += [problem for problem in result if not problem.key or problem.key not in known]
    if problems or job is None:
        raise InvalidJobError(where, problems)
    return job


def _unknown_names(data: dict[str, Any]) -> Iterator[ValidationFinding]:
    if name := _unknown(data.get("task"), known := known_names(TASKS)):
        yield ValidationFinding(("task",), unknown_name("task", name, known))
    for path, kind, list_names in (
        (("search", "method"), "sampler", partial(known_names, SAMPLERS)),
        (("communication", "codec"), "codec", codec_names),
    ):
        section = data.get(path[0])
        value = section.get(path[1], "auto") if isinstance(section, dict) else "auto"
        if value != "auto" and (name := _unknown(value, known := list_names())):
            yield ValidationFinding(path, unknown_name(kind, name, known))
    for key, kind, group in (
        ("trackers", "tracker", TRACKERS),
        ("callbacks", "callback", CALLBACKS),
    ):
        for path, item in _items(data, key):
            if name := _unknown(item, known := known_names(group)):
                yield ValidationFinding(path, unknown_name(kind, name, known))
    for path, item in _items(data, "metrics"):
        if isinstance(item, str) and item and not names_object(item):
            message = (
                f"{item!r} names no function; expected module:function or path/file.py:function"
            )
            yield ValidationFinding(path, message)


def _items(data: dict[str, Any], key: str) -> Iterator[tuple[KeyPath, Any]]:
    """What a list holds, or the one thing that stands for it."""
    value = data.get(key)
    if isinstance(value, list):
        yield from (((key, position), item) for position, item in enumerate(value))
    elif isinstance(value, str):
        yield (key,), value


def _credentials(document: SourceDocument) -> Iterator[Problem]:
    for finding in find_credentials(document.data):
        problem = document.problem(finding.path, finding.message, at_key=finding.at_key)
        if problem.override is not None:
            message = f"{problem.message} (others can also see the arguments of a command)"
            problem = replace(problem, message=message)
        yield problem


def _unknown(name: Any, known: tuple[str, ...]) -> str | None:
    # No names at all means the package runs uninstalled: then nothing can be said.
    if not isinstance(name, str) or not name or not known or name in known:
        return None
    return None if names_object(name) else name


def _as_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-_.")[:63] or "job"


_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_TOKENIZERS = {"auto", "bytes", "bpe"}


def _beside(job: Job, folder: Path) -> Job:
    """Local paths that exist beside the job file, but not from the working directory."""
    data = job.data
    paths: dict[str, str] = {}
    for key in ("train", "validation", "test"):
        if value := getattr(data, key):
            paths[key] = _near(value, folder)
    if data.tokenizer not in _TOKENIZERS:
        paths["tokenizer"] = _near(data.tokenizer, folder)
    model = job.model
    if model.name.startswith("hf:") or model.name.endswith(".keras"):
        model = model.model_copy(update={"name": _near(model.name, folder)})
    if model.weights is not None:
        model = model.model_copy(update={"weights": _near(model.weights, folder)})
    own_code = {
        key: [_near_code(name, folder) for name in getattr(job, key)]
        for key in ("callbacks", "metrics")
        if getattr(job, key)
    }
    changed = {"data": data.model_copy(update=paths), "model": model, **own_code}
    return job.model_copy(update=changed)


def _near_code(text: str, folder: Path) -> str:
    file, colon, name = text.rpartition(":")
    return f"{_near(file, folder)}{colon}{name}" if file.endswith(".py") else text


def _near(text: str, folder: Path) -> str:
    prefix, path = ("hf:", text[3:]) if text.startswith("hf:") else ("", text)
    if _SCHEME.match(path) or _exists(Path(path)) or not _exists(folder / path):
        return text
    return f"{prefix}{folder / path}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a name can be, or not ours to look at
        return False


class JobProblem(Value):
    """One problem of a job file; line and column count from 1, and are absent for overrides."""

    file: str
    line: int | None = None
    column: int | None = None
    key: str | None = None
    message: str
    override: str | None = None
    """The key of the ``--set`` that brought it in."""


class Validation(Value):
    """A job, or why a file does not hold one."""

    job: Job | None = None
    problems: tuple[JobProblem, ...] = ()
    message: str = ""
    """All problems in one text; empty where there are none."""
    hint: str | None = None

    @field_serializer("job")
    def _dump_job(self, job: Job | None) -> dict[str, Any] | None:
        # What the file does not set stays unset: a default may depend on other fields.
        return None if job is None else job.model_dump(mode="json", exclude_unset=True)

    @property
    def is_valid(self) -> bool:
        """Whether there is a job."""
        return self.job is not None

    def require(self) -> Job:
        """The job; raises where there is none."""
        if self.job is None:
            raise JobError(self.message, hint=self.hint)
        return self.job


def check_job(file: str, *, overrides: Sequence[str] = ()) -> Validation:
    """Load a job file and collect its problems."""
    try:
        return Validation(job=load_job(file, overrides=overrides))
    except InvalidJobError as error:
        problems = tuple(JobProblem(file=file, **asdict(problem)) for problem in error.problems)
        return Validation(problems=problems, message=error.message, hint=error.hint)
    except JobError as error:
        problem = JobProblem(file=file, message=str(error))
        return Validation(problems=(problem,), message=error.message, hint=error.hint)


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
    at: KeyPath = ("search", "space", name)
    path = _keys_of(name)
    if path[0] == "search":
        yield ValidationFinding(at, "a search cannot vary itself", at_key=True)
    elif path == ("name",):
        yield ValidationFinding(at, "trials are named after their study", at_key=True)
    elif schema_at(path) is None or not _has_item(job, path):
        yield ValidationFinding(at, f"unknown field; {_guess(name)}", at_key=True)


def _keys_of(name: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def _has_item(job: Job, path: KeyPath) -> bool:
    if not isinstance(path[-1], int):
        return True
    try:
        return path[-1] < len(field_value(job, show_dotted(path[:-1])))
    except (KeyError, TypeError):
        return False


def show_dotted(path: KeyPath) -> str:
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
        at: KeyPath = ("search", "space", name, "when", parent)
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
            at: KeyPath = ("search", "first", index, name)
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
    at: KeyPath = ("search", "constraints", index)
    try:
        constraint = read_constraint(text)
    except UnclearConstraintError as error:
        yield ValidationFinding(at, f"{show_value(text)} {error}")
        return
    for name in constraint.names:
        if name in search.space:
            continue
        if schema_at(_keys_of(name)) is None:
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
