"""Determinism: seeds, the state of random generators, deterministic algorithms."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from yunlu.core.settings import set_default_variables
from yunlu.hardware.accelerators import deterministic_defaults
from yunlu.training.device import random_state, restore_random_state, seed_device

_settings: Any = cast("Any", torch)._C


def set_deterministic(mode: bool, *, warn_only: bool = True) -> None:
    """As ``torch.use_deterministic_algorithms``, without importing Inductor to configure it.

    The import takes a second and 70 MB; ``compile_model`` configures the compiler where it is used.
    """
    if mode:
        set_default_variables(deterministic_defaults())
    _settings._set_deterministic_algorithms(mode, warn_only=warn_only)
    compiler: Any = sys.modules.get("torch._inductor.config")
    if compiler is not None:
        compiler.deterministic = mode


class HostRandom(NamedTuple):
    """The state of the generators of the host."""

    python: Any
    numpy: Any
    torch: Tensor


def hold_host_random() -> HostRandom:
    """The state of the host's generators; for every step, hence nothing is converted."""
    return HostRandom(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state())


def return_host_random(state: HostRandom) -> None:
    """Return to what ``hold_host_random`` gave."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


def copy_random(host: HostRandom | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every generator that training may draw from; ``host``: an earlier one there."""
    host = host or hold_host_random()
    version, numbers, gauss = host.python
    name, keys, position, has_gauss, cached = host.numpy
    tensors = {"torch": host.torch, "numpy": torch.from_numpy(np.array(keys, np.int64))}
    if (on_device := random_state()) is not None:
        tensors["device"] = on_device
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, int(position), int(has_gauss), float(cached)],
    }
    return tensors, state


def restore_random(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Restore the state of every generator."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, position, has_gauss, cached = state["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    restore_random_state(tensors.get("device"))


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, replica: int, device: torch.device) -> None:
    """Seed a worker's random numbers for a step; workers of one replica share a seed.

    Not with ``torch.manual_seed``: it queues a call with a formatted stack trace for every device
    type that is not initialised, and never drops them.
    """
    states = np.random.SeedSequence((seed, step, replica)).generate_state(1, np.uint64)
    step_seed = int(states[0] >> 1)
    torch.default_generator.manual_seed(step_seed)
    seed_device(device, step_seed)
