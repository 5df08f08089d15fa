"""HTML pages that need nothing else: no network, no fonts, no libraries.

Both languages are in a page; an attribute of the root decides which one shows. Scripts only add
comfort (hover, switches): everything can be read without them, and on paper.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from yunlu.core.foreign_text import clean_for_page
from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.render.drawing.svg import (
    draw_chart,
    draw_sparkline,
    draw_trial_figure,
    find_legend,
    find_targets,
    read_out,
)
from yunlu.render.format import (
    show_dollars,
    show_finding,
    show_metric,
    show_param,
    show_quantity,
    show_value,
)
from yunlu.render.i18n import known_text, text

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATES = Path(__file__).with_name("templates")


def render_html(
    template: str, *, language: str, scripts: Sequence[str], styles: Sequence[str], **values: Any
) -> str:
    """The whole page.

    Args:
        template: Its file.
        language: ``en`` or ``zh``: what a reader sees first.
        scripts: Files of its script.
        styles: Files of its style sheet.
        values: For the template.
    """
    script = "".join(map(_read, scripts))
    return (
        _environment()
        .get_template(template)
        .render(
            language="zh" if language == "zh" else "en",
            style=Markup("".join(map(_read, styles))),  # noqa: S704 (our own files)
            script=Markup(script),  # noqa: S704 (our own files)
            # Only this very script may run, so nothing smuggled in through data ever does.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=show_bytes,
        count=show_count,
        duration=show_duration,
        dollars=show_dollars,
        instant=_show_instant,
        plain=_show_plain,
    )
    functions: dict[str, Any] = environment.globals  # typed too narrowly by Jinja
    functions.update(
        text=text,
        known_text=known_text,
        finding=show_finding,
        metric=show_metric,
        quantity=show_quantity,
        param=show_param,
        value=show_value,
        draw_chart=draw_chart,
        legend=find_legend,
        read_out=read_out,
        draw_trials=draw_trial_figure,
        draw_spark=draw_sparkline,
        targets=find_targets,
    )
    return environment


def _clean(value: Any) -> Any:
    """Every value on its way into a page, before it is escaped."""
    if hasattr(value, "__html__"):
        return Markup(clean_for_page(value.__html__()))  # noqa: S704 (escaped by whoever made it)
    return clean_for_page(value) if isinstance(value, str) else value


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _show_instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
