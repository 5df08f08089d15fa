"""Yunlu 云炉: plan, train and report large models from one job file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yunlu.client.api import (
        Run,
        finetune,
        list_runs,
        load_model,
        load_run,
        plan,
        resume,
        submit,
        train,
        validate,
    )
    from yunlu.core.errors import YunluError
    from yunlu.estimator import YunluClassifier, YunluRegressor
    from yunlu.planning.plan import Plan
    from yunlu.planning.search.options import PlanOptions
    from yunlu.spec.job import Job
    from yunlu.spec.load import load_job
    from yunlu.training.hooks.callback import Callback
    from yunlu.tuning.study import Study, tune

__version__ = "0.1.0"

# Names are loaded on first use: `import yunlu` costs nothing, and torch stays out until needed.
_HOMES = {
    "Callback": "yunlu.training.hooks.callback",
    "Job": "yunlu.spec.job",
    "Plan": "yunlu.planning.plan",
    "PlanOptions": "yunlu.planning.search.options",
    "Run": "yunlu.client.api",
    "Study": "yunlu.tuning.study",
    "YunluClassifier": "yunlu.estimator",
    "YunluError": "yunlu.core.errors",
    "YunluRegressor": "yunlu.estimator",
    "finetune": "yunlu.client.api",
    "list_runs": "yunlu.client.api",
    "load_job": "yunlu.spec.load",
    "load_model": "yunlu.client.api",
    "load_run": "yunlu.client.api",
    "plan": "yunlu.client.api",
    "resume": "yunlu.client.api",
    "submit": "yunlu.client.api",
    "train": "yunlu.client.api",
    "tune": "yunlu.tuning.study",
    "validate": "yunlu.client.api",
}

__all__ = [  # noqa: RUF022 (in the order a newcomer meets them)
    "train",
    "finetune",
    "plan",
    "submit",
    "tune",
    "Study",
    "PlanOptions",
    "Plan",
    "Job",
    "load_job",
    "validate",
    "Run",
    "list_runs",
    "load_run",
    "load_model",
    "resume",
    "Callback",
    "YunluClassifier",
    "YunluRegressor",
    "YunluError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'yunlu' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
