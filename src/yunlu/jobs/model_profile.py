"""Model shape of a job: from its name, configuration or arguments, else measured once.

What had to be measured is kept as numbers, so that the next plan of the same job imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import ModelError, RehearsalError, TrainingError, YunluError
from yunlu.core.files import make_directory, write_atomically
from yunlu.core.imports import names_object
from yunlu.core.limits import decode_json, read_json
from yunlu.core.processes import start_process, stop_process
from yunlu.core.settings import read_settings
from yunlu.core.value import Value
from yunlu.executors.worker_process import require_training
from yunlu.planning.models.hf_config import can_describe, shape_from_config
from yunlu.planning.models.known_models import find_config, own_adapter, own_transformer
from yunlu.planning.models.shape import ModelShape
from yunlu.planning.plan import Rehearsal
from yunlu.spec.task_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job

_MEASURE = (sys.executable, "-m", "yunlu.training.model_profiler")
_REHEARSE = (sys.executable, "-m", "yunlu.training.rehearsal")
"""Started by module name: nothing here imports ``yunlu.training``."""
_PREFIX = "hf:"
_BYTE_TOKENS = 259
"""Vocabulary of the tokenizer ``bytes``: each byte and three special tokens."""
_PACKAGES = ("yunlu", "torch", "transformers", "peft", "keras")
_WORDS_SHOWN = 5
_SHAPE_LIMIT_S = 300.0
"""How long the model may take to be built and measured on the data, before anything of the run is known."""
REHEARSAL_S = 60.0
"""What a rehearsal may always take: importing torch and a model's code takes seconds by itself."""


class JobShape(Value):
    """A model shape and its source."""

    shape: ModelShape
    source: Literal["known", "config", "arguments", "measured"]
    note: str = ""
    """Note for the user; empty where there is none."""
    seq: int | None = None
    """Tokens per sample, where job, model or data define it."""
    train_samples: int | None = None
    """Training samples, where the data was read."""


def find_shape(job: Job, *, command: Sequence[str] = _MEASURE, measure: bool = True) -> JobShape:
    """Shape of the job's model; measured in a subprocess only where no description is known.

    Args:
        job: Its task, model and data.
        command: Another program that measures, in the place of ours.
        measure: Whether it may be measured; else a model without a description is refused.
    """
    command = command if measure else ()
    result = _described(job, command) or _from_arguments(job) or _measured(job, command)
    seq = result.seq or result.shape.tokens_per_sample or None
    if job.data.max_length != "auto" and result.shape.kind not in {"measured", "vision"}:
        seq = job.data.max_length
    longest = result.shape.longest
    if longest and seq is not None and seq > longest:
        raise ModelError(
            f"data.max_length: {seq} tokens are more than {job.model.name} has positions.",
            hint=f"data.max_length may be {longest} at most",
        )
    return result.model_copy(update={"seq": seq})


def rehearse(
    job: Job, plan: Plan, *, limit_s: float | None = None, command: Sequence[str] = _REHEARSE
) -> Rehearsal:
    """One step of the plan on fake tensors: its memory, and the errors that training would raise.

    Args:
        job: The job.
        plan: Its plan.
        limit_s: Seconds after which it is given up. Default: the share of the predicted time that the job
            allows for measuring, and a minute at least.
        command: Another program that rehearses, in the place of ours.
    """
    if limit_s is None:
        limit_s = max(REHEARSAL_S, job.train.trial_share * plan.prediction.total_s)
    given = {"job": job.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    try:
        answer = ask_training(command, json.dumps(given), limit_s=limit_s)
    except TrainingError as error:
        raise RehearsalError(f"The rehearsal failed: {error.message}", hint=error.hint) from error
    return Rehearsal.model_validate(answer["found"])


def _described(job: Job, command: Sequence[str]) -> JobShape | None:
    """From a ``config.json``: in a directory, built in, or downloaded alone from the hub."""
    name = job.model.name
    index = Path(name.removeprefix(_PREFIX)).expanduser()
    if (index / "config.json").is_file():
        config, where = _read(index / "config.json"), str(index / "config.json")
        source: Literal["known", "config"] = "config"
    elif not name.startswith(_PREFIX) or index.is_dir():
        return None
    elif (known := find_config(name.partition("@")[0])) is not None:
        config, where, source = known, f"{name} (built in)", "known"
    else:
        config, where, source = _fetch(str(index), command), f"{name}: config.json", "config"
    config = {**config, **job.model.args}
    if index.is_dir() and not can_describe(config):
        return None  # it is local, so it can be measured
    shape = shape_from_config(config, where=where, head=traits_of(job.task).head)
    adapted = {"name": name.removeprefix(_PREFIX), "adapter": own_adapter(job.model.adapter)}
    return JobShape(shape=shape.model_copy(update=adapted), source=source)


def _read(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a configuration: it is not an object.")
    return config


def _from_arguments(job: Job) -> JobShape | None:
    """Our own transformer, where the job defines the vocabulary."""
    kind = traits_of(job.task).transformer
    # How many labels a classifier has is known only from the data.
    if (
        kind is None
        or kind == "classifier"
        or job.model.name != "transformer"
        or job.data.max_length == "auto"
    ):
        return None
    if job.data.tokenizer == "bytes":
        vocabulary = _BYTE_TOKENS
    elif job.data.tokenizer == "bpe" and job.data.vocabulary != "auto":
        vocabulary = job.data.vocabulary
    else:
        return None
    sizes = {"vocabulary": vocabulary, "max_length": job.data.max_length}
    arguments: dict[str, Any] = {**job.model.args, **sizes}
    try:
        shape = own_transformer(kind, **arguments)
    except TypeError:
        return None  # an unknown argument: the builder has a better error message
    adapted = shape.model_copy(update={"adapter": own_adapter(job.model.adapter)})
    return JobShape(shape=adapted, source="arguments")


def _measured(job: Job, command: Sequence[str]) -> JobShape:
    path = read_settings().cache / "shapes" / f"{_fingerprint(job)}.json"
    try:
        return JobShape.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        pass  # never measured, damaged, or of another version
    answer = ask_training(command, job.model_dump_json(), limit_s=_SHAPE_LIMIT_S)["found"]
    result = JobShape(
        shape=ModelShape.model_validate(answer["shape"]),
        source="measured",
        note=answer["note"],
        seq=answer["seq"],
        train_samples=answer["train_samples"],
    )
    _keep(path, result.model_dump_json())
    return result


def _fetch(name: str, command: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    path = read_settings().cache / "shapes" / f"config-{digest}.json"
    try:
        return decode_json(path.read_bytes())
    except (OSError, ValueError):
        pass  # never downloaded, or damaged
    config = ask_training(command, "", ("--config", name))["config"]
    _keep(path, json.dumps(config))
    return config


def _keep(path: Path, text: str) -> None:
    try:
        make_directory(path.parent)
        write_atomically(path, text)
    except OSError:
        pass  # without a cache the next plan measures again


def ask_training(
    command: Sequence[str],
    given: str,
    arguments: Sequence[str] = (),
    *,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """Answer of a subprocess that may import torch; its errors are raised here."""
    if not command:
        raise ModelError("The model is not described anywhere, and was never measured.")
    require_training()
    child = start_process([*command, *arguments], is_piped=True, errors=subprocess.PIPE)
    try:
        output, errors = child.communicate(given.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise TrainingError(f"it took longer than {limit_s:.0f} s") from error
    finally:  # Ctrl-C ends it, too
        stop_process(child, number=signal.SIGKILL)
    try:
        answer: dict[str, Any] = decode_json(output)
    except ValueError as error:
        error_lines = errors.decode(errors="replace").strip().splitlines()
        text = "\n".join(error_lines[-_WORDS_SHOWN:]) or "it printed nothing"
        raise TrainingError(
            f"the model could not be measured (exit code {child.returncode}):\n{text}",
            hint="yunlu validate JOB checks the job; yunlu doctor checks the installation",
        ) from error
    if "error" in answer:
        raise _as_error(answer["error"])
    return answer


def _as_error(answer: Mapping[str, Any]) -> YunluError:
    kinds = {kind.code: kind for kind in _every_kind(YunluError)}
    return kinds.get(answer["code"], YunluError)(answer["message"], hint=answer["hint"])


def _every_kind(kind: type[YunluError]) -> list[type[YunluError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _every_kind(child))]


def _fingerprint(job: Job) -> str:
    """Hash of everything a measured shape depends on: model, data, code and packages."""
    result = {
        "task": job.task,
        "model": job.model.model_dump(mode="json"),
        "data": job.data.model_dump(mode="json"),
        "directory": str(Path.cwd()),
        "packages": [_version(package) for package in _PACKAGES],
        "files": [_stamp(path) for path in _files(job)],
    }
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:32]


def _files(job: Job) -> list[Path]:
    """Local files it depends on: the user's code, data, configuration."""
    paths = [Path(job.data.train).expanduser()]
    for reference in (job.model.name, job.task):
        if names_object(reference):
            module = reference.rpartition(":")[0]
            is_file = module.endswith(".py")
            paths.append(Path(module if is_file else f"{module.replace('.', '/')}.py"))
    if job.model.name.startswith(_PREFIX):
        paths.append(Path(job.model.name.removeprefix(_PREFIX)).expanduser() / "config.json")
    return paths


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return str(path), seen.st_size, seen.st_mtime_ns


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
