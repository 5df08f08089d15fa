"""The report of a run: one HTML page, and ``report.json`` beside it."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.core.settings import read_settings
from yunlu.core.units import show_bytes, show_count, show_duration, show_number
from yunlu.jobs.communication import without_name
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.report_model import ReportPage
from yunlu.jobs.worker_groups import gist_of
from yunlu.render.format import show_fault, show_metric, show_quantity, show_rate
from yunlu.render.html_page import render_html
from yunlu.render.i18n import BilingualText, known_text, same, text
from yunlu.render.run_figures import (
    communication_figures,
    comparison_figure,
    confusion_figure,
    expectation_figure,
    layout_figure,
    phase_totals,
    progress_figure,
    run_figures,
    step_time_figure,
    time_figure,
    time_totals,
    worker_bars,
)
from yunlu.runs.events import MemoryExhausted, PrecisionChanged, RolledBack, StepSkipped
from yunlu.runs.run_store import Document
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.jobs.communication import ChosenMethod, Expectation, HostLinks
    from yunlu.jobs.report_model import ConfusionMatrix, EvaluationRow, Report, WorkerGroupHistory
    from yunlu.runs.fold import GroupGeneration, Incident, LostWorker
    from yunlu.runs.run_store import RunStore

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
        "cards": list(_communication_cards(newest)),
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


def _communication_cards(
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


_MOST_LAYOUTS = 8
_MOST_ROWS = 200
_LONGEST = 160


def present_workers(group: WorkerGroupHistory) -> dict[str, Any]:
    """Everything that the section shows."""
    earlier = group.changes[:-1]
    rows = list(_rows(group))
    return {
        "cards": list(_group_cards(group)),
        "progress": progress_figure(group),
        "step_time": step_time_figure(group),
        "newest": layout_figure(group, group.newest),
        "earlier": [layout_figure(group, change) for change in earlier[-_MOST_LAYOUTS:]],
        "left_out": max(0, len(earlier) - _MOST_LAYOUTS),
        "rows": rows[-_MOST_ROWS:],
        "rows_total": len(rows),
        "bars": worker_bars(group),
        "stats": list(_stats(group)),
    }


def _group_cards(group: WorkerGroupHistory) -> Iterator[tuple[BilingualText, str, BilingualText]]:
    if group.effective is not None:
        lost, wall = show_duration(group.lost_s), show_duration(group.wall_s)
        effective = f"{group.effective * 100:.1f} %"
        yield text("workers.effective"), effective, text("workers.lost", lost=lost, wall=wall)
    ranks = group.newest.ranks
    hosts = text("workers.on_hosts", count=len({rank.host for rank in ranks}))
    count = text("workers.count", workers=len(ranks))
    yield text("workers.now"), group.newest.layout, count + " · " + hosts
    redone = text("workers.redone", steps=f"{group.redone_steps:,}")
    yield text("workers.changes"), str(len(group.changes) - 1), redone
    kinds = Counter(fault.cause for fault in group.faults)
    remark = same("")
    for index, (kind, count) in enumerate(kinds.items()):
        remark = remark + (" · " if index else "") + known_text("fault", kind) + f" {count}"
    yield text("workers.faults"), str(kinds.total() - kinds["left"]), remark
    if group.communication_share is not None:
        share = f"{group.communication_share * 100:.1f} %"
        yield text("workers.communication"), share, text("workers.of_step")


def _rows(group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """Faults, changes and stragglers in the order they happened."""
    rows = [(fault.at, 0, _fault_row(fault)) for fault in group.faults]
    for before, change in pairwise([None, *group.changes]):
        if change is not None:
            rows.append((change.at, 1, _change_row(before, change)))
    for slow in group.stragglers:
        ratio = text("workers.slow", ratio=f"{slow.ratio:.1f}")
        name = _describe(slow.worker, slow.rank, slow.host, ratio)
        row = {"kind": "straggler", "step": slow.step, "name": name, "reason": ""}
        rows.append((slow.at, 2, row))
    for at, _, row in sorted(rows, key=lambda entry: entry[:2]):
        elapsed_s = group.elapsed_at(at)
        yield {
            "elapsed": show_duration(elapsed_s) if elapsed_s > 0 else "–",
            "lost": None,
            "redone": 0,
            **row,
        }


def _fault_row(fault: LostWorker) -> dict[str, Any]:
    reason = gist_of(fault.detail)
    return {
        "kind": "fault",
        "step": fault.step,
        "name": _describe(fault.worker, fault.rank, fault.host, show_fault(fault)),
        "reason": reason if len(reason) <= _LONGEST else reason[: _LONGEST - 1] + "…",
    }


def _change_row(before: GroupGeneration | None, change: GroupGeneration) -> dict[str, Any]:
    workers = len(change.ranks)
    if before is None:
        name = text("workers.began", workers=workers, layout=change.layout)
    elif before.layout == change.layout:
        name = text("workers.same", workers=workers, layout=change.layout)
    else:
        name = text("workers.became", workers=workers, before=before.layout, layout=change.layout)
    return {
        "kind": "regroup",
        "step": change.from_step,
        "name": name,
        "reason": change.reason,
        "lost": show_duration(change.lost_s) if change.lost_s is not None and before else None,
        "redone": change.redone_steps,
    }


def _describe(worker: str, rank: int | None, host: str, what: BilingualText) -> BilingualText:
    shown_rank = "–" if rank is None else rank
    return text("workers.who", worker=worker, rank=shown_rank, host=host or "–", what=what)


def _stats(group: WorkerGroupHistory) -> Iterator[dict[str, Any]]:
    """A row for each worker, beside its bar."""
    slow = {straggler.worker: straggler.ratio for straggler in group.stragglers}
    for worker in group.workers:
        yield {
            "row": worker,
            "lost": known_text("fault", worker.lost) if worker.lost else None,
            "idle": worker.rank is None and not worker.lost,
            "slow": slow.get(worker.worker),
        }


_MOST_OPERATORS = 15
_FEW = 8


def render_page(report: Report, *, language: str = "en") -> str:
    """The whole page; ``language`` (``en`` or ``zh``) is what a reader sees first."""
    # Overflows are how a loss scale is found: one sentence, not a row each.
    incidents = [
        incident
        for incident in report.incidents
        if not (isinstance(incident, StepSkipped) and incident.reason == "overflow")
    ]
    return render_html(
        "run.html.j2",
        language=language,
        scripts=["page.js"],
        styles=["style.css"],
        report=report,
        cards=list(_cards(report)),
        evaluations=_evaluations(report),
        figures=list(run_figures(report)),
        comparisons=[(row, comparison_figure(row)) for row in report.comparisons if row.is_known],
        time_figure=time_figure(report),
        time_totals=time_totals(report),
        metric_names=list(
            dict.fromkeys(name for row in report.evaluations for name in row.metrics)
        ),
        confusion=_confusion(report.confusion),
        incidents=[_incident(incident) for incident in incidents[-_MOST_ROWS:]],
        incidents_total=len(incidents),
        trace=_trace(report),
        workers=present_workers(report.worker_group) if report.worker_group else None,
        communication=present_communication(report),
    )


def _cards(report: Report) -> Iterator[tuple[BilingualText, str, BilingualText]]:
    """Label, value and remark of each headline number."""
    if (headline := report.headline) is not None:
        remark = text("card.test" if headline.split == "test" else "card.validation")
        label = known_text("metric", headline.metric)
        yield label, show_metric(headline.metric, headline.value), remark
    elif (loss := report.curve("train_loss")) is not None:
        yield text("curve.loss"), show_number(loss.values[-1]), text("card.training")
    for quantity in ("total_s", "samples_per_s", "dollars", "memory_bytes"):
        row = report.comparison(quantity)
        if row.measured is None:
            continue
        remark = same("")
        if row.predicted is not None:
            remark = text("card.predicted", value=show_quantity(quantity, row.predicted))
        yield text(f"quantity.{quantity}"), show_quantity(quantity, row.measured), remark
    if (group := report.worker_group) is not None and group.effective is not None:
        changes = len(group.changes) - 1
        remark = text("card.effective", lost=show_duration(group.lost_s), count=changes)
        yield text("workers.effective"), f"{group.effective * 100:.1f} %", remark
    if (padding := report.padding) is not None:
        remark = text("card.tokens", tokens=show_count(padding.tokens))
        yield text("card.padding"), f"{padding.share * 100:.1f} %", remark
    if report.step:
        epochs = "–" if report.epoch is None else show_count(report.epoch)
        remark = text("card.epochs", epochs=epochs)
        if report.plan:
            remark = text("card.of", total=f"{report.plan.steps:,}", epochs=epochs)
        yield text("card.steps"), f"{report.step:,}", remark


def _incident(event: Incident) -> dict[str, Any]:
    """What happened, and whatever its event says about it."""
    match event:
        case StepSkipped():
            loss, norm = show_number(event.loss), show_number(event.norm)
            reason, details = event.reason, [text("incident.skip", loss=loss, norm=norm)]
        case RolledBack():
            reason = ""
            details = [text("incident.rollback", to_step=show_number(event.to_step))]
            if event.skipping:
                details.append(text("incident.skipping", steps=_show_steps(event.skipping)))
        case MemoryExhausted():
            reason = event.message
            details = [text("incident.out_of_memory", micro_batch=event.micro_batch)]
        case PrecisionChanged():
            reason = event.reason
            details = [
                same(event.module, code=True),
                text("incident.low_share", share=f"{event.low_share * 100:.1f} %"),
            ]
    what = known_text("mark", event.kind)
    if isinstance(event, PrecisionChanged):
        what = known_text("incident.to", event.to)
    if reason:  # after the module that it is about
        details.insert(isinstance(event, PrecisionChanged), known_text("reason", reason))
    return {"step": event.step, "kind": event.kind, "what": what, "details": details}


def _show_steps(steps: Sequence[int]) -> str:
    shown = [show_number(step) for step in steps[:_FEW]]
    return ", ".join(shown) + (", …" if len(steps) > _FEW else "")


def _trace(report: Report) -> dict[str, Any] | None:
    if report.trace is None:
        return None
    operators = report.trace.table[:_MOST_OPERATORS]
    return {
        "phases": phase_totals(report.trace),
        "operators": [(operator, _operator_name(operator.name)) for operator in operators],
    }


def _operator_name(name: str) -> BilingualText:
    """Operators are called the same in every language; what is none has a text."""
    outside = re.fullmatch(r"outside operators \((\w+)\)", name)
    if outside is None:
        return same(name, code=True)
    return text("trace.outside", phase=known_text("phase", outside[1]))


def _evaluations(report: Report) -> list[EvaluationRow]:
    """Of very many, an even choice; the best, the last and the test's always."""
    rows = report.evaluations
    stride = math.ceil(len(rows) / _MOST_ROWS)
    return [
        row
        for index, row in enumerate(reversed(rows))
        if not index % stride or row.best or row.split == "test"
    ][::-1]


def _confusion(matrix: ConfusionMatrix | None) -> dict[str, Any] | None:
    if matrix is None:
        return None
    order = range(len(matrix.labels))
    mistakes = [
        (matrix.counts[i][j], matrix.labels[i], matrix.labels[j])
        for i in order
        for j in order
        if i != j and matrix.counts[i][j]
    ]
    return {
        "matrix": matrix,
        "figure": confusion_figure(matrix),
        "mistakes": sorted(mistakes, key=lambda mistake: -mistake[0])[:5],
    }


def find_page(run: RunStore) -> ReportPage:
    """The page that was written; that of another user's run is rendered anew, from its data alone."""
    if run.foreign_owner is not None:
        html = render_page(build_report(run), language=read_settings().language)
        return ReportPage(location="", html=html)
    content = run.read(Document.REPORT_PAGE)
    if content is None:
        raise StoreError(f"{run.id} has no report yet", hint=f"yunlu report {run.id} writes it")
    return ReportPage(
        location=str(run.location(Document.REPORT_PAGE)), html=content.decode("utf-8")
    )


def write_report(run: RunStore) -> Report:
    """Build the report and publish ``report.json`` and ``report.html`` in the run's directory.

    Nothing is written to the run of another user, and nothing is learnt from it.
    """
    report = build_report(run)
    if run.foreign_owner is not None:
        return report
    page = render_page(report, language=read_settings().language)
    try:
        run.write(Document.REPORT, report.model_dump_json() + "\n")
        run.write(Document.REPORT_PAGE, page)
    except OSError as error:
        raise StoreError(
            f"The report cannot be written to {run.address}: {error.strerror or error}.",
            hint="Free some space or give yourself write access; the run itself is unharmed.",
        ) from error
    if report.state is RunState.FINISHED:
        from yunlu.jobs.calibration import learn_from  # noqa: PLC0415 (arrays are slow to import)

        with suppress(OSError, StoreError):  # without a place for it, the next plan knows less
            learn_from([run])
    return report
