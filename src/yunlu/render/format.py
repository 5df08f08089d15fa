"""Values as text for people: metrics, predicted quantities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.render.i18n.texts import known_text, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.jobs.report_model import WorkerFault, Finding
    from yunlu.render.i18n.texts import BilingualText

_SHARES = ("accuracy", "f1", "precision", "recall")


def metric_unit(name: str, values: Sequence[float]) -> Literal["number", "percent"]:
    """Percent for what is a share by its name and its values."""
    is_share = any(word in name.lower() for word in _SHARES)
    return "percent" if is_share and all(0 <= value <= 1 for value in values) else "number"


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


def show_fault(fault: WorkerFault) -> BilingualText:
    """What happened to a worker: ``was killed``, ``hung``, ..."""
    return known_text("fault", fault.what)
