"""Communication on the page: what was chosen against what, over which links, and what it did."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from yunlu.core.units import show_bytes, show_duration
from yunlu.jobs.communication import without_name
from yunlu.render.figures.run import communication_figures
from yunlu.render.i18n.texts import BilingualText, known_text, same, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.jobs.communication import Chosen, Expectation, HostLinks
    from yunlu.jobs.report_model import Report

_MOST_CHOICES = 50
_MOST_CANDIDATES = 16
_MOST_HOSTS = 8
_EVERY = re.compile(r", every (\d+) steps")
_GAIN = re.compile(r"([\d.]+) times as fast as all-reduce")


def picture_communication(report: Report) -> dict[str, Any] | None:
    """Everything that the page's section about communication shows."""
    communication = report.communication
    if communication is None:
        return None
    newest, choices = communication.newest, communication.choices
    candidates = list(_candidates(newest))
    return {
        "cards": list(_cards(newest)),
        "choices": [_choice(each) for each in choices[-_MOST_CHOICES:]],
        "choices_total": len(choices),
        "expectations": list(_expectations(newest)),
        "candidates": candidates,
        "left_out": len(newest.candidates) - len(candidates),
        "refused": [
            {"name": each.name, "reason": each.reason} for each in newest.refused if each.name
        ],
        "links": [_host(each) for each in newest.links[:_MOST_HOSTS]],
        "hosts": [each.host for each in newest.links[:_MOST_HOSTS]],
        "hosts_left_out": max(0, len(newest.links) - _MOST_HOSTS),
        "figures": list(communication_figures(report)),
    }


def _cards(chosen: Chosen) -> Iterator[tuple[Markup, str, Markup]]:
    guarantee = known_text("guarantee", chosen.guarantee)
    yield text("communication.chosen"), _name(chosen.name), guarantee
    shown = (
        ("step_s", show_duration),
        ("exchange_s", show_duration),
        ("sent_bytes", show_bytes),
    )
    for quantity, show in shown:
        told = chosen.expectation(quantity)
        if told is not None and told.measured is not None:
            remark = same("")
            if told.predicted is not None:
                remark = text("card.predicted", value=show(told.predicted))
            yield text(f"communication.{quantity}"), show(told.measured), remark
    if chosen.compression_error is not None:
        share = f"{chosen.compression_error * 100:.2g} %"
        yield text("communication.error"), share, text("communication.error_how")


def _choice(chosen: Chosen) -> dict[str, Any]:
    told = chosen.expectation("step_s")
    return {
        "row": chosen,
        "name": _name(chosen.name),
        "why": _reason(chosen),
        "predicted": _shown(told.predicted if told else None),
        "measured": _shown(told.measured if told else None),
        "ratio": "" if told is None or told.ratio is None else f"× {told.ratio:.2f}",
    }


def _reason(chosen: Chosen) -> BilingualText:
    """A reason with figures comes in English only; in Chinese it is told again from these figures."""
    reason = without_name(chosen)
    told = {each.quantity: each.predicted or 0.0 for each in chosen.expectations}
    rates = [
        rate
        for each in chosen.links
        for rate in (each.send_bytes_per_s, each.receive_bytes_per_s)
        if rate is not None
    ]
    if not rates or not told.get("exchange_s"):
        return known_text("communication.reason", reason)
    gain = _GAIN.search(reason)
    why = text(
        "communication.why_gain" if gain else "communication.why",
        links=" – ".join(dict.fromkeys((show_rate(min(rates)), show_rate(max(rates))))),
        sent=show_bytes(told.get("sent_bytes", 0.0)),
        exchange=show_duration(told["exchange_s"]),
        hidden=show_duration(told["exchange_s"] - told.get("wait_s", 0.0)),
        gain=gain[1] if gain else "",
    )
    if chosen.aside:  # the English reason names them already
        why += text("communication.aside", hosts=", ".join(chosen.aside))
    return BilingualText(en=reason or why.en, zh=why.zh)


def _expectations(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """Bars as shares of the longer of the two."""
    for each in chosen.expectations:
        if each.predicted is None:
            continue
        longest = max(each.predicted, each.measured or 0.0)
        show = show_bytes if each.quantity == "sent_bytes" else show_duration
        yield {
            "title": text(f"communication.{each.quantity}"),
            "ratio": _ratio(each),
            "predicted": show(each.predicted),
            "measured": "–" if each.measured is None else show(each.measured),
            "predicted_share": each.predicted / longest if longest else 0.0,
            "measured_share": (each.measured or 0.0) / longest if longest else 0.0,
        }


def _ratio(each: Expectation) -> str:
    return "" if each.ratio is None or not math.isfinite(each.ratio) else f"× {each.ratio:.2f}"


def _candidates(chosen: Chosen) -> Iterator[dict[str, Any]]:
    """The best ones, and always what was chosen and torch's own sum."""
    longest = max((each.cost_s for each in chosen.candidates), default=0.0)
    for place, each in enumerate(chosen.candidates):
        if place < _MOST_CANDIDATES or each.is_chosen or each.name == "all-reduce":
            yield {
                "row": each,
                "name": _name(each.name),
                "share": each.cost_s / longest if longest else 0.0,
            }


def _host(each: HostLinks) -> dict[str, Any]:
    pairs = list(zip(each.bytes_per_s, each.latency_s, strict=True))[:_MOST_HOSTS]
    return {
        "row": each,
        "computes": _shown(each.compute_s),
        "send": show_rate(each.send_bytes_per_s),
        "receive": show_rate(each.receive_bytes_per_s),
        "to": [{"rate": show_rate(rate), "latency": _shown(latency)} for rate, latency in pairs],
    }


def _name(name: str) -> BilingualText:
    """Methods and codecs are called the same everywhere; how often is said in both languages."""
    chinese = _EVERY.sub(lambda match: text("communication.every", steps=match[1]).zh, name)
    background = text("communication.background")
    return BilingualText(en=name, zh=chinese.replace(background.en, background.zh))


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else show_duration(seconds)
