"""Section of the run report about communication: what was chosen, over which links, with what effect."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from yunlu.core.units import show_bytes, show_duration
from yunlu.jobs.communication import without_name
from yunlu.render.figures.run import communication_figures, expectation_figure
from yunlu.render.format import show_rate
from yunlu.render.i18n.texts import BilingualText, known_text, same, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.communication import ChosenMethod, Expectation, HostLinks
    from yunlu.jobs.report_model import Report

_MOST_CHOICES = 50
_MOST_CANDIDATES = 16
_MOST_HOSTS = 8
_EVERY = re.compile(r", every (\d+) steps")
_GAIN = re.compile(r"([\d.]+) times as fast as all-reduce")


def present_communication(report: Report) -> dict[str, Any] | None:
    """Everything that the section shows; None where the run has one worker."""
    communication = report.communication
    if communication is None:
        return None
    newest, choices = communication.newest, communication.choices
    candidates = list(_candidates(newest))
    shown_links = newest.links[:_MOST_HOSTS]
    return {
        "cards": list(_cards(newest)),
        "choices": [_choice(choice) for choice in choices[-_MOST_CHOICES:]],
        "choices_total": len(choices),
        "expectations": [
            (expectation_figure(row), _show_ratio(row))
            for row in newest.expectations
            if row.predicted is not None
        ],
        "candidates": candidates,
        "left_out": len(newest.candidates) - len(candidates),
        "refused": [refused for refused in newest.refused if refused.name],
        "links": [_links(links) for links in shown_links],
        "hosts": [links.host for links in shown_links],
        "hosts_left_out": max(0, len(newest.links) - _MOST_HOSTS),
        "figures": list(communication_figures(report)),
    }


def _cards(
    chosen: ChosenMethod,
) -> Iterator[tuple[BilingualText, BilingualText | str, BilingualText]]:
    guarantee = known_text("guarantee", chosen.guarantee)
    yield text("communication.chosen"), _method_name(chosen.name), guarantee
    quantities = {"step_s": show_duration, "exchange_s": show_duration, "sent_bytes": show_bytes}
    for quantity, show in quantities.items():
        row = chosen.expectation(quantity)
        if row is not None and row.measured is not None:
            remark = same("")
            if row.predicted is not None:
                remark = text("card.predicted", value=show(row.predicted))
            yield text(f"communication.quantity.{quantity}"), show(row.measured), remark
    if chosen.compression_error is not None:
        share = f"{chosen.compression_error * 100:.2g} %"
        yield text("communication.error"), share, text("communication.error_how")


def _choice(chosen: ChosenMethod) -> dict[str, Any]:
    row = chosen.expectation("step_s")
    return {
        "row": chosen,
        "name": _method_name(chosen.name),
        "reason": _reason(chosen),
        "predicted": _show_seconds(row.predicted if row else None),
        "measured": _show_seconds(row.measured if row else None),
        "ratio": _show_ratio(row),
    }


def _reason(chosen: ChosenMethod) -> BilingualText:
    """The recorded reason is in English; the Chinese one is written again from the same numbers."""
    reason = without_name(chosen)
    predicted = {row.quantity: row.predicted or 0.0 for row in chosen.expectations}
    rates = [
        rate
        for links in chosen.links
        for rate in (links.send_bytes_per_s, links.receive_bytes_per_s)
        if rate is not None
    ]
    if not rates or not predicted.get("exchange_s"):
        return known_text("communication.reason", reason)
    gain = _GAIN.search(reason)
    written = text(
        "communication.why_gain" if gain else "communication.why",
        links=" – ".join(dict.fromkeys((show_rate(min(rates)), show_rate(max(rates))))),
        sent=show_bytes(predicted.get("sent_bytes", 0.0)),
        exchange=show_duration(predicted["exchange_s"]),
        hidden=show_duration(predicted["exchange_s"] - predicted.get("wait_s", 0.0)),
        gain=gain[1] if gain else "",
    )
    if chosen.excluded:
        written += text("communication.excluded", hosts=", ".join(chosen.excluded))
    return BilingualText(en=reason or written.en, zh=written.zh)


def _show_ratio(row: Expectation | None) -> str:
    if row is None or row.ratio is None or not math.isfinite(row.ratio):
        return ""
    return f"× {row.ratio:.2f}"


def _candidates(chosen: ChosenMethod) -> Iterator[dict[str, Any]]:
    """The best ones, and always the chosen one and torch's own all-reduce."""
    longest = max((candidate.cost_s for candidate in chosen.candidates), default=0.0)
    for index, candidate in enumerate(chosen.candidates):
        is_reference = candidate.is_chosen or candidate.name == "all-reduce"
        if index < _MOST_CANDIDATES or is_reference:
            yield {
                "row": candidate,
                "name": _method_name(candidate.name),
                "share": candidate.cost_s / longest if longest else 0.0,
            }


def _links(links: HostLinks) -> dict[str, Any]:
    pairs = list(zip(links.bytes_per_s, links.latency_s, strict=True))[:_MOST_HOSTS]
    return {
        "row": links,
        "computes": _show_seconds(links.compute_s),
        "send": show_rate(links.send_bytes_per_s),
        "receive": show_rate(links.receive_bytes_per_s),
        "to": [
            {"rate": show_rate(rate), "latency": _show_seconds(latency)} for rate, latency in pairs
        ],
    }


def _method_name(name: str) -> BilingualText:
    """Methods and codecs are called the same everywhere; how often they act has a translation."""
    chinese = _EVERY.sub(lambda match: text("communication.every", steps=match[1]).zh, name)
    background = text("communication.background")
    return BilingualText(en=name, zh=chinese.replace(background.en, background.zh))


def _show_seconds(seconds: float | None) -> str:
    return "–" if seconds is None else show_duration(seconds)
