"""A job written in Python: a ``Job``, or a function that returns one."""

from __future__ import annotations

import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from yunlu.core.errors import JobError, YunluError, did_you_mean
from yunlu.spec.explain import explain
from yunlu.spec.job import Job
from yunlu.spec.problems import InvalidJobError, Problem, show_path
from yunlu.spec.schema import home_of

if TYPE_CHECKING:
    from pathlib import Path


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
