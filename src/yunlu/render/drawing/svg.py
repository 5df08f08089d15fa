"""SVG that fills its box: paths in a frame that stretches to any width.

Strokes do not stretch with the drawing (``vector-effect`` in the style sheet); texts would, so they
are not part of it: a drawing names positions at which the page sets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from yunlu.render.drawing.ticks import Tick

WIDTH, HEIGHT = 1000, 400


def draw_path(
    classes: str, pieces: Iterable[str], *, key: str | None = None, trial: int | None = None
) -> Markup:
    """One path; nothing where there are no pieces."""
    d = "".join(pieces)
    if not d:
        return Markup("")
    owner = Markup(' data-key="{}"').format(key) if key else Markup("")
    owner += Markup(' data-trial="{}"').format(trial) if trial is not None else Markup("")
    return Markup('<path class="{}"{} d="{}"/>').format(classes, owner, d)


def draw_frame(content: Markup) -> Markup:
    """The whole drawing."""
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(WIDTH, HEIGHT, content)


def draw_grid(ticks: Sequence[Tick]) -> Markup:
    """A line across at each label."""
    return draw_path("grid", (f"M0 {place_y(tick.at)}H{WIDTH}" for tick in ticks))


def draw_verticals(classes: str, shares: Iterable[float], *, floor: float = 0.0) -> Markup:
    """Lines from the top down to the floor."""
    return draw_path(classes, (f"M{place_x(share)} 0V{place_y(floor)}" for share in shares))


def join(shares: Sequence[tuple[float, float]]) -> str:
    """A line through points; a lone point becomes a dot by its round cap."""
    if not shares:
        return ""
    return "M" + "L".join(map(_place, shares)) + ("h0" if len(shares) == 1 else "")


def dot(share: tuple[float, float]) -> str:
    """A dot, whatever the drawing is stretched to."""
    return f"M{_place(share)}h0"


def place_x(share: float) -> str:
    """Horizontal coordinate."""
    return f"{share * WIDTH:.1f}".removesuffix(".0")


def place_y(share: float) -> str:
    """Vertical coordinate, counted from the bottom."""
    return f"{(1 - share) * HEIGHT:.1f}".removesuffix(".0")


def _place(share: tuple[float, float]) -> str:
    return f"{place_x(share[0])} {place_y(share[1])}"
