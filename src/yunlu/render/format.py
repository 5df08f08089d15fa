"""Values as text, the same on pages and in the terminal; commands to copy and paths to open."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Literal

import yaml

from yunlu.core.limits import decode_json
from yunlu.core.units import (
    estimate_dollars,
    estimate_time,
    show_bytes,
    show_count,
    show_duration,
    show_number,
)
from yunlu.render.i18n import known_text, text
from yunlu.runs.home import is_run_id
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from yunlu.jobs.report_model import Finding
    from yunlu.render.i18n import BilingualText
    from yunlu.runs.events import WorkerLost
    from yunlu.tuning.facts import StudyView, TrialFacts
    from yunlu.tuning.values import Dimension, ParamValue

_MBIT_PER_BYTE = 8e-6
_SHARE_METRICS = ("accuracy", "f1", "precision", "recall")


def metric_unit(name: str, values: Sequence[float]) -> Literal["number", "percent"]:
    """Percent for what is a share by its name and its values."""
    is_share = is_share_metric(name)
    return "percent" if is_share and all(0 <= value <= 1 for value in values) else "number"


def is_share_metric(name: str) -> bool:
    """Whether a metric of this name is usually a share."""
    return any(part in name.lower() for part in _SHARE_METRICS)


def show_metric(name: str, value: float | None) -> str:
    """A metric as people say it: shares in percent, the rest as numbers."""
    if value is None:
        return "–"
    is_share = metric_unit(name, [value]) == "percent"
    return f"{value * 100:.2f} %" if is_share else show_number(value)


def show_quantity(quantity: str, value: float | None) -> str:
    """A field of ``Prediction`` with its unit."""
    if value is None:
        return "–"
    if quantity == "memory_bytes":
        return show_bytes(value)
    if quantity == "samples_per_s":
        return f"{show_count(value)}/s"
    if quantity == "dollars":
        return f"${value:,.2f}" if value >= 0.01 or value == 0 else f"${value:.2g}"
    return show_duration(value)


def show_finding(finding: Finding) -> BilingualText:
    """The sentence of a finding."""
    return text(f"finding.{finding.key}", **finding.fields)


def show_fault(fault: WorkerLost) -> BilingualText:
    """What happened to a worker: ``was killed``, ``hung``, ..."""
    return known_text("fault", fault.cause)


def show_rate(bytes_per_s: float | None) -> str:
    """Links are known by their bits: ``95.4 Mbit/s``, ``2.5 Gbit/s``."""
    if bytes_per_s is None:
        return "–"
    mbit = _MBIT_PER_BYTE * bytes_per_s
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def show_param(value: ParamValue) -> str:
    """A value of a setting, short."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e6:
            return f"{value:.0f}"
        return f"{value:.2e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.3g}"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def show_value(metric: str, value: float | None) -> str:
    """A metric as people say it; cost in dollars, time in its units."""
    if value is not None and metric in {"cost", "seconds"}:
        return show_dollars(value) if metric == "cost" else show_duration(value)
    return show_metric(metric, value)


def show_dollars(dollars: float) -> str:
    """Cents where they matter, and less where there is less."""
    if dollars >= 100:
        return f"${dollars:,.0f}"
    if dollars >= 0.1 or dollars == 0:
        return f"${dollars:.2f}"
    return f"${dollars:#.2g}" if dollars >= 0.0001 else "< $0.0001"


def show_range(dimension: Dimension) -> str:
    """What was searched, in a few words."""
    if dimension.choices:
        return ", ".join(map(show_param, dimension.choices))
    log = ", log" if dimension.log else ""
    low, high = (
        int(edge) if dimension.is_int else edge for edge in (dimension.low, dimension.high)
    )
    return f"{show_param(low)} … {show_param(high)}{log}"


def show_amount(quantity: str, amount: float) -> str:
    """A figure of the forecast with its unit."""
    if quantity == "trials":
        return f"{amount:.0f}"
    return show_duration(amount) if quantity == "seconds" else show_dollars(amount)


def show_estimate(quantity: str, interval: Mapping[str, float]) -> tuple[str, str]:
    """A figure of the forecast and its interval, with the digits that it is known to."""
    edges = interval["value"], interval["low"], interval["high"]
    if quantity == "trials":
        value, low, high = (f"{edge:.0f}" for edge in edges)
        return value, f"{low}–{high}" if low != high else ""
    return estimate_time(*edges) if quantity == "seconds" else estimate_dollars(*edges)


def shorten(fields: Iterable[str]) -> dict[str, str]:
    """Each dotted field by its last part, or by as many of its last parts as tell it apart."""
    parts = {field: field.split(".") for field in fields}
    short: dict[str, str] = {}
    for field, own in parts.items():
        others = [item for other, item in parts.items() if other != field]
        count = next(
            (
                n
                for n in range(1, len(own))
                if not any(own[-n:] == one_other[-n:] for one_other in others)
            ),
            len(own),
        )
        short[field] = ".".join(own[-count:])
    return short


def train_command(view: StudyView, facts: TrialFacts) -> str:
    """The command that trains a job with a trial's setting."""
    job = view.source or "JOB"
    params = {**view.extra, **facts.params}
    settings = [
        f"--set {shlex.quote(f'{name}={_as_yaml(value)}')}" for name, value in params.items()
    ]
    # Overrides of the search do not concern a training.
    own = [
        f"--set {shlex.quote(override)}"
        for override in view.overrides
        if not override.startswith("search.")
    ]
    return " ".join(["yunlu train", shlex.quote(job), *own, *settings])


def run_path(view: StudyView, facts: TrialFacts) -> Path | None:
    """The directory of a trial's run."""
    if facts.run is None or not is_run_id(facts.run):
        return None
    return view.path.parent.parent / facts.run


def model_path(view: StudyView, facts: TrialFacts) -> Path | None:
    """Where the model of a trial was exported, if it was."""
    run = run_path(view, facts)
    return run / "model" if run is not None and (run / "model").is_dir() else None


def report_link(view: StudyView, facts: TrialFacts, beside: Path) -> str | None:
    """How a page links to the report of a trial's run."""
    run = run_path(view, facts)
    if run is None or not (run / Document.REPORT_PAGE).is_file():
        return None
    return os.path.relpath(run / Document.REPORT_PAGE, beside.parent).replace(os.sep, "/")


def _as_yaml(value: ParamValue) -> str:
    """As ``--set`` reads it back; a list or a mapping stands in a setting as its JSON text."""
    if isinstance(value, str):
        return value if _is_encoded(value) or _is_word(value) else json.dumps(value)
    text = json.dumps(value)
    # YAML takes 1e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def _is_encoded(text: str) -> bool:
    try:
        return isinstance(decode_json(text), list | dict)
    except ValueError:
        return False


def _is_word(text: str) -> bool:
    try:
        return yaml.safe_load(text) == text
    except yaml.YAMLError:
        return False
