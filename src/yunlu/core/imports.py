"""Code by name: what packages register by entry point, and the user's own ``module:object``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import JobError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint
    from types import ModuleType

    from yunlu.core.errors import YunluError

TASKS = "yunlu.tasks"
OPTIMIZERS = "yunlu.optimizers"
TASK_TRAITS = "yunlu.task_traits"
TRACKERS = "yunlu.trackers"
EXECUTORS = "yunlu.executors"
POLICIES = "yunlu.policies"
SAMPLERS = "yunlu.samplers"
CODECS = "yunlu.codecs"
CALLBACKS = "yunlu.callbacks"

OWN_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``module:Class``: the user's own code, imported only by the worker."""
OWN_FILE = r"^[^:]+\.py:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``path/file.py:Class``: the same, by its file."""


def known_names(group: str) -> tuple[str, ...]:
    """The names on offer behind one door. Nothing is imported."""
    return tuple(sorted(_registered(group)))


def load_registered(group: str, name: str, *, kind: str, error: type[YunluError] = JobError) -> Any:
    """Import what is registered under a name; an unknown one is refused with the nearest."""
    points = _registered(group)
    if name not in points:
        raise error(f"There is no {kind} {name!r}.", hint=did_you_mean(name, points))
    return points[name].load()


@cache  # to look through every installed package takes tens of milliseconds
def _registered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names_object(reference: str) -> bool:
    """Whether the text has the form ``module:object`` or ``path/file.py:object``."""
    module, colon, name = reference.rpartition(":")
    dotted = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return bool(colon) and dotted and all(part.isidentifier() for part in name.split("."))


def import_object(reference: str) -> Any:
    """The object that ``module:object`` names; the working directory is importable."""
    if not names_object(reference):
        raise JobError(
            f"{reference!r} does not name an object.",
            hint="write module:Class or path/file.py:Class",
        )
    module_name, _, object_name = reference.rpartition(":")
    _make_importable(Path.cwd())
    if module_name.endswith(".py"):
        module = _load_file(Path(module_name).expanduser(), reference)
    else:
        module = _load_module(module_name, reference)
    result: Any = module
    for part in object_name.split("."):
        if not hasattr(result, part):
            public = [name for name in vars(result) if not name.startswith("_")]
            raise JobError(
                f"{reference}: {module_name} has no {part!r}.", hint=did_you_mean(part, public)
            )
        result = getattr(result, part)
    return result


def make_object(reference: str) -> Any:
    """One of the class that ``module:Class`` names, made without arguments."""
    result = import_object(reference)
    if not callable(result):
        raise JobError(
            f"{reference} is not a class, but of {type(result).__name__}.",
            hint="name a class, or a function that makes an object",
        )
    with suppress(ValueError):  # of what is written in C, the arguments may not be known
        try:
            inspect.signature(result).bind()
        except TypeError as error:
            raise JobError(
                f"{reference} cannot be made without arguments: {error}.",
                hint="give its arguments defaults, or name a function that makes one",
            ) from error
    return result()


def call_with(factory: Callable[..., Any], **options: Any) -> Any:
    """Call a factory with those of the options that it declares by name."""
    parameters = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in options.items() if name in parameters})


def _load_module(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The user's module may exist and itself import something that does not.
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise JobError(
                f"{reference}: there is no module {missing!r}.",
                hint=f"run from the directory that holds it ({Path.cwd()} is searched), "
                "or write path/file.py:Class",
            ) from error
        raise _failed(reference, error) from error
    except (Exception, SystemExit) as error:  # a script may end the program when imported
        raise _failed(reference, error) from error


def _load_file(path: Path, reference: str) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise JobError(f"{reference}: there is no file {path}.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if _is_free(path) else f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(reference, error) from error
    return module


def _is_free(path: Path) -> bool:
    """Whether the file may take its own name: data-loading processes then find it again by it."""
    if not path.stem.isidentifier() or path.stem in sys.modules:
        return False
    spec = importlib.util.find_spec(path.stem)
    return spec is None or spec.origin == str(path)


def _failed(reference: str, error: BaseException) -> JobError:
    return JobError(
        f"{reference} cannot be imported: {type(error).__name__}: {error}",
        hint="run with --debug to see where",
    )


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
