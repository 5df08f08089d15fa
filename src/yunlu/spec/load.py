"""Load a job from YAML, Python or a mapping; report every problem at once."""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import asdict, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, field_serializer

from yunlu.core.errors import JobError, YunluError, did_you_mean
from yunlu.core.limits import over_limit
from yunlu.core.settings import read_limits
from yunlu.core.value import Value
from yunlu.spec.communication import codec_names
from yunlu.spec.credentials import find_credentials
from yunlu.spec.entry_points import OWN_CODE, SAMPLERS, TASKS, TRACKERS, known_names
from yunlu.spec.job import Job
from yunlu.spec.overrides import apply_overrides
from yunlu.spec.schema import ValidationFinding, explain, home_of, show_value, unknown_name
from yunlu.spec.search_checks import find_faults
from yunlu.spec.source import InvalidJobError, Problem, SourceDocument, parse, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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


__all__ = ["InvalidJobError", "Problem", "job_from_mapping", "load_job", "source_of"]

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
    trackers = data.get("trackers")
    for position, tracker in enumerate(trackers if isinstance(trackers, list) else []):
        if name := _unknown(tracker, known := known_names(TRACKERS)):
            yield ValidationFinding(("trackers", position), unknown_name("tracker", name, known))


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
    return None if re.fullmatch(OWN_CODE, name) else name


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
    return job.model_copy(update={"data": data.model_copy(update=paths), "model": model})


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
