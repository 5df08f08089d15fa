"""The only place that reads or writes environment variables."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import YunluError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says, read once per process."""

    home: Path
    """Where runs live: ``YUNLU_HOME``, else ``./yunlu-runs``."""
    cache: Path
    """Where made data sets and measurements are kept: ``YUNLU_CACHE``."""
    config: Path
    """Where the user's own settings are kept: ``YUNLU_CONFIG``, else ``~/.config/yunlu``."""
    executors: frozenset[str]
    """Addresses of the user's clusters, separated by spaces: ``YUNLU_EXECUTORS``."""
    trusted_users: frozenset[str]
    """Names or ids of users whose files count as one's own: ``YUNLU_TRUSTED_USERS``, with commas."""
    dollars_per_hour: float | None
    """What this machine costs an hour: ``YUNLU_DOLLARS_PER_HOUR``; prices the plan."""
    language: str
    """``zh`` where ``YUNLU_LANG`` or the locale asks for Chinese, else ``en``."""
    patience: float
    """Factor on the time limits of watchdogs: ``YUNLU_PATIENCE``, else 1. Raise it on machines that other
    programs keep busy, where a healthy worker may send its heartbeat late."""


def read_settings() -> Settings:
    """Read the environment afresh."""
    env = os.environ
    config_root = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    cache_root = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Settings(
        home=Path(env.get("YUNLU_HOME") or "yunlu-runs").expanduser().absolute(),
        cache=Path(env.get("YUNLU_CACHE") or cache_root / "yunlu").expanduser().absolute(),
        config=Path(env.get("YUNLU_CONFIG") or config_root / "yunlu").expanduser().absolute(),
        executors=frozenset(env.get("YUNLU_EXECUTORS", "").split()),
        trusted_users=frozenset(env.get("YUNLU_TRUSTED_USERS", "").replace(",", " ").split()),
        dollars_per_hour=_price(env.get("YUNLU_DOLLARS_PER_HOUR")),
        language=read_language(),
        patience=_patience(env.get("YUNLU_PATIENCE")),
    )


def terminal_columns() -> int | None:
    """Columns that output is to have whatever it goes to: ``COLUMNS``; None where nothing says it."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def read_language() -> str:
    """``zh`` or ``en``: ``YUNLU_LANG``, else what the system speaks, as POSIX orders the variables."""
    names = ("YUNLU_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    spoken = next((value for name in names if (value := os.environ.get(name))), "en")
    return "zh" if spoken.lower().startswith("zh") else "en"


def limits_setting() -> str:
    """Limits on foreign files that differ from the defaults: ``YUNLU_LIMITS``."""
    return os.environ.get("YUNLU_LIMITS") or ""


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep what they downloaded: theirs, shared with other programs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(root) / "huggingface").expanduser().absolute()


def _patience(text: str | None) -> float:
    if not text:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise YunluError(
            f"YUNLU_PATIENCE is {text!r}, which is not a factor.",
            hint="Set it to a number above 0 such as 2, or unset it.",
        )
    return factor


def _price(text: str | None) -> float | None:
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise YunluError(
            f"YUNLU_DOLLARS_PER_HOUR is {text!r}, which is not a price.",
            hint="Set it to a number such as 2.5, or unset it.",
        )
    return price


def environment_variables() -> Mapping[str, str]:
    """Every variable of this process: ``core.secrets`` masks the values of secret ones."""
    return os.environ


def worker_environment(*, threads: int | None = None) -> dict[str, str]:
    """The environment a worker process starts with."""
    env = dict(os.environ)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(threads))
    return env


def ray_authentication() -> dict[str, str]:
    """What a client of a Ray cluster needs to use the token that the environment names.

    ``ray://`` connections ignore ``RAY_AUTH_TOKEN`` and ``RAY_AUTH_TOKEN_PATH`` unless the mode says so,
    too. The file ``~/.ray/auth_token`` may be for another cluster: it is sent only in mode ``token``.
    """
    env = os.environ
    has_token = bool(env.get("RAY_AUTH_TOKEN") or env.get("RAY_AUTH_TOKEN_PATH"))
    return {"RAY_AUTH_MODE": "token"} if has_token and "RAY_AUTH_MODE" not in env else {}


def set_default_variables(values: Mapping[str, str]) -> None:
    """For libraries that read them when they are first used; what the user set stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


@contextmanager
def override_variables(values: Mapping[str, str]) -> Generator[None]:
    """Set variables of this process, and of what it starts meanwhile; then as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def use_keras_on_torch() -> None:
    """Keras reads its backend from the environment at import time."""
    os.environ["KERAS_BACKEND"] = "torch"


def use_network_interface(name: str | None) -> None:
    """Gloo reads from the environment over which interface the workers talk."""
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def read_site() -> str | None:
    """Where this machine stands, for workers that keep together by site: ``YUNLU_SITE``."""
    return os.environ.get("YUNLU_SITE") or None


def bind_setting() -> str | None:
    """Address to listen on, or ``auto``: ``YUNLU_BIND``."""
    return os.environ.get("YUNLU_BIND") or None


def read_accelerators() -> tuple[str, Mapping[str, str]]:
    """What ``YUNLU_ACCELERATORS`` declares (``npu:8``, ``cpu``), and the environment that hides devices."""
    return os.environ.get("YUNLU_ACCELERATORS", ""), os.environ


def launch_secret() -> str | None:
    """Secret that externally launched workers prove to each other: ``YUNLU_SECRET``."""
    return os.environ.get("YUNLU_SECRET") or None


def launch_variables() -> dict[str, str]:
    """What a launcher of several processes (torchrun, srun, mpirun) told this one."""
    beginnings = ("SLURM_", "OMPI_COMM_WORLD_", "PMI_", "TORCHELASTIC_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    names |= {"MPI_LOCALRANKID", "PMIX_NAMESPACE", "GLOO_SOCKET_IFNAME"}
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(beginnings)
    }
