"""Names of optimisers and learning-rate schedules elsewhere, and ours for them."""

from __future__ import annotations

import re
from typing import Any

from yunlu.spec.counterparts.counterpart import NotTakenError, Taken

OPTIMIZERS: dict[str, Taken] = {
    "adamw": {"train.optimizer.name": "adamw"},
    "adam": {"train.optimizer.name": "adam"},
    "sgd": {"train.optimizer.name": "sgd"},
    "lamb": {"train.optimizer.name": "lamb"},
    "lars": {"train.optimizer.name": "lars"},
    "adamw8bit": {"train.optimizer.name": "adamw", "train.optimizer.state": "8bit"},
    "adam8bit": {"train.optimizer.name": "adam", "train.optimizer.state": "8bit"},
}
"""By lower-case class name without marks; a package's optimiser can be registered under its own."""

_KERNELS = re.compile(r"^(fused|deepspeedcpu|onebit)|(torchxla|torchnpufused|torchfused|torch)$")

SCHEDULES: dict[str, Taken] = {
    "linear": {"train.schedule.name": "linear"},
    "cosine": {"train.schedule.name": "cosine"},
    "cosinewithminlr": {"train.schedule.name": "cosine"},
    "cosinewarmupwithminlr": {"train.schedule.name": "cosine"},
    "constant": {"train.schedule.name": "constant"},
    "constantwithwarmup": {"train.schedule.name": "constant"},
    "warmupstabledecay": {"train.schedule.name": "wsd"},
    "reducelronplateau": {"train.schedule.name": "plateau"},
    "cosineannealinglr": {"train.schedule.name": "cosine"},
    "cosinedecay": {"train.schedule.name": "cosine"},
    "linearlr": {"train.schedule.name": "linear"},
    "constantlr": {"train.schedule.name": "constant"},
    "polynomiallr": {"train.schedule.name": "linear"},
    "warmuplr": {"train.schedule.name": "constant"},
    "warmupdecaylr": {"train.schedule.name": "linear"},
    "warmupcosinelr": {"train.schedule.name": "cosine"},
    "getcosineschedulewithwarmup": {"train.schedule.name": "cosine"},
    "getlinearschedulewithwarmup": {"train.schedule.name": "linear"},
    "getconstantschedulewithwarmup": {"train.schedule.name": "constant"},
}
"""Likewise; the classes of torch, Keras and DeepSpeed and the words of Transformers."""


def optimizer_keys(name: Any) -> Taken:
    """Our keys for an optimiser by its class or its word."""
    plain = _plain(name)
    taken = OPTIMIZERS.get(plain) or OPTIMIZERS.get(_KERNELS.sub("", plain))
    if taken is None:
        raise NotTakenError(
            f"the optimiser {name} is not built in: register it, see docs/optimizers.md"
        )
    return dict(taken)


def schedule_keys(name: Any) -> Taken:
    """Our keys for a schedule by its class or its word."""
    taken = SCHEDULES.get(_plain(name))
    if taken is None:
        raise NotTakenError(
            f"the schedule {name} is not offered: constant, linear, cosine, wsd or plateau"
        )
    return dict(taken)


def _plain(name: Any) -> str:
    last = re.split(r"[.:]", str(name))[-1]
    plain = re.sub(r"[^a-z0-9]", "", last.lower())
    return {"adamwbnb8bit": "adamw8bit", "adamwtorch8bit": "adamw8bit", "pagedadamw8bit": "adamw8bit",
            "adamwhf": "adamw"}.get(plain, plain)  # fmt: skip
