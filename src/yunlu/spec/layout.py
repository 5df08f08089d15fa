"""``layout`` of a job: sizes of the parallel axes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from yunlu.core.value import Value
from yunlu.spec.fields import Auto, Count, conflict

SPLITTING = ("dp", "fsdp", "tp", "pp")
"""The axes whose product is the number of workers."""

_NO_CONTEXT_PARALLEL = (
    "context parallel is not available: torch has no sharding strategy for the attention kernels "
    "of a CPU, and on GPUs it is not built yet"
)


class LayoutSpec(Value):
    """How many ways each axis splits the work; what is not said is chosen."""

    dp: Count | Auto = "auto"
    """Replicas, each with the whole model and its own samples of a step."""
    fsdp: Count | Auto = "auto"
    """Ways in which weights, gradients and optimiser state are sharded; each shard has its own samples."""
    tp: Count | Auto = "auto"
    """Ways in which each weight matrix is cut."""
    pp: Count | Auto = "auto"
    """Stages in a row, each with some of the layers."""
    cp: Count = 1
    """Ways in which one sample's sequence is cut for attention; not available yet."""
    sequence: bool = False
    """With ``tp``: between the cut matrices, the sequence is cut too."""
    vocabulary: bool = False
    """With ``tp``: the loss is computed on the cut vocabulary."""
    zero1: bool = False
    """With ``dp``: replicas share out the optimiser's state."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved"] = "auto"
    """With ``pp``: the order in which a stage takes its micro-batches; ``auto`` is ``1f1b``."""
    stages_per_rank: Count | Auto = "auto"
    """With ``pp``: more than one only where the schedule is ``interleaved``, which takes 2."""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that are said, with their sizes."""
        given = {axis: getattr(self, axis) for axis in SPLITTING}
        return {axis: size for axis, size in given.items() if size != "auto"}

    @property
    def said_workers(self) -> int:
        """The product of the axes that are said."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to choose: the layout itself says how many workers it has."""
        return len(self.sizes) == len(SPLITTING)

    def __str__(self) -> str:
        """As it could be written: ``dp2 x tp2``, ``single``, ``auto``."""
        axes = [f"{axis}{size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(axes) or ("single" if self.is_whole else "auto")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.cp > 1:
            conflict("cp", _NO_CONTEXT_PARALLEL)
        self._check_options_of_tp()
        self._check_options_of_pp()
        if self.zero1 and self.dp == 1:
            conflict("zero1", "shares the optimiser's state among replicas, but dp is 1")
        if self.zero1 and self.fsdp not in {"auto", 1}:
            conflict("zero1", "fsdp shards the optimiser's state already; remove one of them")
        return self

    def _check_options_of_tp(self) -> None:
        for key in ("sequence", "vocabulary"):
            if getattr(self, key) and self.tp in {"auto", 1}:
                conflict(key, "needs tp: say how many ways each matrix is cut, such as tp: 2")

    def _check_options_of_pp(self) -> None:
        stages, schedule = self.stages_per_rank, self.schedule
        is_piped = self.pp not in {"auto", 1}
        if schedule != "auto" and not is_piped:
            conflict("schedule", "needs pp: say how many stages there are, such as pp: 2")
        if stages not in {"auto", 1} and not is_piped:
            conflict(
                "stages_per_rank", "needs pp: say how many ranks stand in a row, such as pp: 2"
            )
        if stages == 1 and schedule == "interleaved":
            conflict("stages_per_rank", "the interleaved schedule needs 2 or more")
        if stages not in {"auto", 1} and schedule not in {"auto", "interleaved"}:
            conflict("stages_per_rank", f"{stages} needs the interleaved schedule, not {schedule}")


_WORD = r"(dp|fsdp|tp|pp|cp)[=:]?([1-9]\d{0,5})"
_TEXT = rf"^\s*(auto|single|{_WORD}(\s*[x×*, ]\s*{_WORD})*)\s*$"


def read_axes(text: str) -> dict[str, int] | None:
    """The axes of ``dp2 x tp2``; none of ``single``; None where the text is not a layout."""
    if text.strip() == "single":
        return {}
    sizes: dict[str, int] = {}
    for word in re.split(r"\s*[x×*,\s]\s*", text.strip()):
        match = re.fullmatch(_WORD, word)
        if match is None or match[1] in sizes:
            return None
        sizes[match[1]] = int(match[2])
    return sizes


def spell_layout(text: str) -> dict[str, Any] | None:
    """The mapping that a text stands for: it names the whole layout, so the other axes are 1."""
    if text.strip() == "auto":
        return {}
    sizes = read_axes(text)
    return None if sizes is None else {**dict.fromkeys(SPLITTING, 1), **sizes}


def _widen(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    spelt = spell_layout(value)
    if spelt is None:
        raise PydanticCustomError("not_a_layout", "expected a layout")
    return spelt


_LayoutText = Annotated[
    str,
    Field(
        pattern=_TEXT,
        json_schema_extra={"patternErrorMessage": "'auto', 'single', a layout such as 'dp2 x tp2'"},
    ),
]
LayoutField = Annotated[
    LayoutSpec, BeforeValidator(_widen, json_schema_input_type=_LayoutText | LayoutSpec)
]
"""A layout as text or as a mapping."""
