"""Error hierarchy: each error says what happened, what was expected and what to do."""

from __future__ import annotations

import difflib
import errno
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class YunluError(Exception):
    """A mistake or fault a user can act on; shown without a traceback.

    ``code`` is stable (scripts may test for it); ``hint`` says what to do next.
    """

    code = "yunlu"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would forget the hint on the way out of a loading process.
        return _rebuild, (type(self), self.message, self.hint)

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


def _rebuild(kind: type[YunluError], message: str, hint: str | None) -> YunluError:
    error = kind.__new__(kind)
    YunluError.__init__(error, message, hint=hint)
    return error


def error_of_code(
    code: str, message: str, *, hint: str | None = None, traceback: str | None = None
) -> YunluError:
    """An error that another process reported, as the class that has its code."""
    kinds = {kind.code: kind for kind in YunluError.__subclasses__() if "code" in vars(kind)}
    error = kinds.get(code, YunluError)(message, hint=hint)
    error.code = code
    if traceback:
        error.__cause__ = WorkerTraceback(traceback)
    return error


class WorkerTraceback(Exception):  # noqa: N818 (the traceback of an error, not another error)
    """Traceback of an error in the worker; shown with ``--debug``."""

    def __str__(self) -> str:
        return "in the worker:\n" + str(self.args[0])


class JobError(YunluError):
    """The job file, or an override of it, is not valid."""

    code = "job"


class DataError(YunluError):
    """The data cannot be read, is empty, or does not fit the task."""

    code = "data"


class ModelError(YunluError):
    """The model cannot be built or loaded, or does not fit the data."""

    code = "model"


class RehearsalError(YunluError):
    """A step cannot be rehearsed, which says nothing about training it."""

    code = "rehearsal"


class TrainingError(YunluError):
    """Training cannot go on: the loss is not finite, memory or disk ran out."""

    code = "training"


class CheckpointError(YunluError):
    """A checkpoint is torn, altered, or does not fit the model."""

    code = "checkpoint"


class StoreError(YunluError):
    """The run store cannot answer: no such run, an illegal move, an unreadable index."""

    code = "store"


class MissingPartError(YunluError):
    """An optional package or program is not installed."""

    code = "missing"


def missing_part(package: str, extra: str, purpose: str) -> MissingPartError:
    """Say which optional package is absent, what for, and the command that installs it."""
    return MissingPartError(
        f"{purpose} needs the package {package}, which is not installed.",
        hint=f'pip install "yunlu[{extra}]"',
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word a user most likely meant, if one is close enough."""
    close_matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close_matches[0] if close_matches else None


_LISTED_MOST = 600
"""Letters of what is known that a message can hold."""
_LISTED_BESIDE = 16
"""Names of it beside a suggestion: the answer is not to drown in them."""
_NEAR = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` where a near word exists, then what is known, as far as it can be read."""
    names = sorted(known)
    guess = nearest(word, names)
    listing = f"known: {', '.join(names)}"
    if guess:
        if len(names) > _LISTED_BESIDE:
            near = difflib.get_close_matches(word, names, n=_NEAR + 1, cutoff=0.6)[1:]
            listing = f"{len(names)} are known"
            if near:
                listing = f"near it: {', '.join(near)}; {len(names)} are known"
        return f"did you mean {guess!r}? ({listing})"
    if len(listing) > _LISTED_MOST:
        listing = listing[:_LISTED_MOST].rpartition(",")[0] + ", …"
    return listing


def is_disk_full(error: BaseException) -> bool:
    """Whether the error, or what caused it, is the disk or quota running out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return True
        # safetensors reports the operating system's words from Rust, without an errno.
        if "No space left on device" in str(cause) or "os error 28" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
