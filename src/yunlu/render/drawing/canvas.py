"""What a study's pictures are drawn with: SVG that fills its box, and places for the page's texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.render.drawing.charts import Tick
    from yunlu.render.drawing.study_axes import Axis
    from yunlu.tuning.view import StudyView, TrialFacts

WIDTH, HEIGHT = 1000, 400
LEVELS = 6
"""Shades from the best trials to the worst."""

Spot = tuple[float, float, "TrialFacts"]
"""Shares from the left and from the bottom, and whose it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upright:
    """One of several axes beside each other."""

    at: float
    name: str
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing without its texts, and the texts' places."""

    id: str
    title: Markup
    svg: Markup
    x_name: Markup | None = None
    y_name: Markup | None = None
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    uprights: tuple[Upright, ...] = ()
    points: tuple[tuple[float, float, int], ...] = ()
    """What can be pointed at: shares from the left and from the bottom, and whose it is."""
    star: tuple[float, float] | None = None
    """The best trial."""
    note: Markup | None = None
    legend: tuple[tuple[Markup, str], ...] = ()
    """Names, each with the class of its key."""
    wide: bool = False

    @property
    def gutter(self) -> int:
        """Characters of the longest label on the vertical axis."""
        return max((len(tick.label) for tick in self.y_ticks), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shades:
    """How good each trial is, as a shade: 0 for the best."""

    ranks: Mapping[int, float] = field(default_factory=dict[int, float])

    def of(self, facts: TrialFacts) -> str:
        """The class of a trial's marks."""
        if facts.number not in self.ranks:
            return "q-none"
        return f"q{min(int(self.ranks[facts.number] * LEVELS), LEVELS - 1)}"

    def look(self, view: StudyView, facts: TrialFacts) -> str:
        """The same, but the best trial has a look of its own."""
        return "q-best" if is_best(view, facts) else self.of(facts)


def is_best(view: StudyView, facts: TrialFacts) -> bool:
    """Whether the study has found nothing better."""
    return view.best is not None and view.best.number == facts.number


def draw_dots(
    view: StudyView, spots: Sequence[Spot], shades: Shades, *, size: str = "spot"
) -> Markup:
    """A dot for each trial, the better on top of the worse."""
    # A ring of the ground's colour tells dots apart that overlap.
    drawn = draw_path(
        "halo", [f"M{_x(left)} {_y(up)}h0" for left, up, _ in spots] if size == "spot" else []
    )
    for left, up, facts in sorted(spots, key=lambda each: -shades.ranks.get(each[2].number, 2.0)):
        # "h0" gives a lone point its round cap: a dot, whatever the drawing is stretched to.
        piece = f"M{_x(left)} {_y(up)}h0"
        drawn += draw_path(f"{size} {shades.look(view, facts)}", [piece], number=facts.number)
    return drawn


def join(places: Sequence[tuple[float, float]]) -> str:
    """A line through all of them."""
    drawn = "L".join(f"{_x(left)} {_y(up)}" for left, up in places)
    return f"M{drawn}" + ("h0" if len(places) == 1 else "") if places else ""


def draw_grid(y: Axis, count: int = 5) -> Markup:
    """A line across at each label."""
    return draw_path("grid", (f"M0 {_y(tick.at)}H{WIDTH}" for tick in y.ticks(count)))


def draw_poles(places: Iterable[float], floor: float) -> Markup:
    """Upright lines, from the top down to the floor."""
    return draw_path("pole", (f"M{_x(at)} 0V{_y(floor)}" for at in places))


def draw_path(classes: str, pieces: Iterable[str], *, number: int | None = None) -> Markup:
    """One element; nothing where there are no pieces."""
    d = "".join(pieces)
    if not d:
        return Markup("")
    whose = Markup(' data-trial="{}"').format(number) if number is not None else ""
    return Markup('<path class="{}"{} d="{}"/>').format(classes, whose, d)


def frame(content: Markup) -> Markup:
    """A drawing that stretches to any width."""
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(WIDTH, HEIGHT, content)


def _x(share: float) -> str:
    return f"{share * WIDTH:.1f}".removesuffix(".0")


def _y(share: float) -> str:
    return f"{(1 - share) * HEIGHT:.1f}".removesuffix(".0")
