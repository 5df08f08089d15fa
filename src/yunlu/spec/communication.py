"""``communication`` of a job: method, codec, guarantee."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from yunlu.core.errors import did_you_mean
from yunlu.core.imports import CODECS, OWN_CODE, known_names
from yunlu.core.value import Value
from yunlu.spec.fields import Auto, Checked, Count, CountOrZero, Fraction, Positive, conflict

if TYPE_CHECKING:
    from collections.abc import Iterable

Guarantee = Literal["exact", "near", "relaxed"]
MethodName = Literal[
    "all-reduce",
    "ring",
    "tree",
    "double-tree",
    "doubling",
    "direct",
    "server",
    "hierarchical",
    "asynchronous",
    "local",
    "post-local",
    "diloco",
]
CodecName = Literal["none", "fp16", "bf16", "int8", "int4", "onebit", "topk", "randomk", "powersgd"]
Consistency = Literal["bsp", "ssp", "asp"]
Correction = Literal["none", "rate", "delay"]

_METHODS: tuple[str, ...] = get_args(MethodName)
_CODECS: tuple[str, ...] = get_args(CodecName)
"""Built-in ones: what they keep is known. Others are ``relaxed``, and only used where named."""
LOCAL = ("local", "post-local", "diloco")
GUARANTEES: tuple[Guarantee, ...] = ("exact", "near", "relaxed")
"""From the strictest on."""
_PASSED_ON = ("all-reduce", "ring", "tree", "double-tree", "doubling", "server", "hierarchical")
_NEAR_CODECS = ("fp16", "bf16", "int8", "int4", "onebit")

_Kept = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), Checked]


class CommunicationSpec(Value):
    """How gradients or weights travel between the replicas of a model; what is not said is chosen."""

    method: Literal[MethodName, Auto] = "auto"
    """Which path they take: ``auto`` measures the links and takes the fastest that keeps the guarantee."""
    codec: str = Field(default="auto", min_length=1)
    """How they are packed: a name (``yunlu schema`` lists them) or your own ``module:Class``; ``auto`` goes by the guarantee, and is ``none`` where a method is named."""
    guarantee: Literal[Guarantee, Auto] = "auto"
    """What may change: ``exact`` nothing but rounding; ``near`` the final loss by 1 %; ``relaxed`` more. ``auto`` is ``exact``, or what a named method and codec keep."""
    every: Count | Auto = "auto"
    """Local methods: steps between two exchanges."""
    together: Literal["worker", "site"] = "worker"
    """Local methods: who makes steps together: each worker alone, or those of a ``site`` (a machine, or all that have the same ``YUNLU_SITE``), of whom one meets the other sites."""
    parts: Count = 1
    """Local methods: parts of the model that take turns within ``every`` steps, so that less is sent at a time (streaming)."""
    start: CountOrZero | Auto = "auto"
    """``post-local``: synchronous until this step; ``onebit``: packed from this step on."""
    outer_lr: Positive | Auto = "auto"
    """``diloco``: how much of the averaged change is taken."""
    outer_momentum: Fraction | Auto = "auto"
    """``diloco``: Nesterov momentum of the averaged changes."""
    keep: _Kept = 0.01
    """``topk`` and ``randomk``: the share of the values that travels."""
    rank: Count = 4
    """``powersgd``: rank of the factors that stand for each matrix."""
    servers: Count | Auto = "auto"
    """``server`` and ``asynchronous``: over how many servers the weights are shared out."""
    consistency: Consistency = "ssp"
    """``asynchronous``: ``bsp`` waits for all, ``ssp`` for those too far behind, ``asp`` for nobody."""
    staleness: CountOrZero = 4
    """``asynchronous`` with ``ssp``: a step begins at most so many after the oldest that is not over."""
    correction: Correction = "none"
    """``asynchronous``: what is done about stale gradients: ``rate`` takes smaller steps, ``delay`` estimates what they would be now."""
    backups: CountOrZero = 0
    """``asynchronous`` with ``bsp``: how many late workers a step does not wait for."""
    trust: Literal["workers", "network"] = "workers"
    """Whom workers on several machines trust: ``workers`` only those that prove the run's secret, over encrypted connections; ``network`` everybody who can reach them, which NCCL needs and which saves gloo a tunnel."""

    @property
    def kept(self) -> Guarantee:
        """What the named method and codec keep, or what was asked for."""
        if self.guarantee != "auto":
            return self.guarantee
        return strictest(self.method, self.codec)

    def __str__(self) -> str:
        """As it could be written."""
        parts = [str(word) for word in (self.method, self.codec) if word != "auto"]
        return " + ".join(parts) or "auto"

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        given = strictest(self.method, self.codec)
        if self.guarantee != "auto" and GUARANTEES.index(given) > GUARANTEES.index(self.guarantee):
            conflict(
                "guarantee",
                f"is {self.guarantee}, but {self} keeps only {given}; "
                f"ask for {given}, or leave method and codec to auto",
            )
        self._check_options()
        if self.method == "asynchronous" and self.codec not in ("auto", *_CODECS):
            conflict("codec", f"{self.codec} is not known to servers; take one such as int8")
        if self.codec == "powersgd" and self.method in (*LOCAL, "asynchronous"):
            conflict(
                "codec",
                f"powersgd packs sums of gradients, and {self.method} makes none; "
                "take another, such as int8",
            )
        if self.codec not in {"auto", "none", "powersgd"} and self.method in _PASSED_ON:
            conflict(
                "codec",
                f"{self.codec} would have to be unpacked and packed again at every worker on the way "
                f"of {self.method}; take direct or auto",
            )
        return self

    def _check_options(self) -> None:
        """A key that would do nothing is a mistake."""
        method, codec = self.method, self.codec
        is_asynchronous = method == "asynchronous"
        late = method == "post-local" or codec == "onebit"
        self._needs("every", "local, post-local and diloco", holds=method in LOCAL)
        self._needs("together", "local, post-local and diloco", holds=method in LOCAL)
        self._needs("parts", "local, post-local and diloco", holds=method in LOCAL)
        if self.every != "auto" and self.parts > self.every:
            conflict("parts", f"{self.parts} parts cannot take turns within {self.every} steps")
        self._needs("outer_lr", "diloco", holds=method == "diloco")
        self._needs("outer_momentum", "diloco", holds=method == "diloco")
        self._needs("start", "post-local and onebit", holds=late)
        self._needs("keep", "topk and randomk", holds=codec in {"topk", "randomk", "auto"})
        self._needs("rank", "powersgd", holds=codec in {"powersgd", "auto"})
        self._needs(
            "servers", "server and asynchronous", holds=is_asynchronous or method == "server"
        )
        self._needs("consistency", "asynchronous", holds=is_asynchronous)
        stale = is_asynchronous and self.consistency == "ssp"
        self._needs("staleness", "asynchronous with consistency: ssp", holds=stale)
        self._needs("correction", "asynchronous", holds=is_asynchronous)
        waits = is_asynchronous and self.consistency == "bsp"
        self._needs("backups", "asynchronous with consistency: bsp", holds=waits)

    def _needs(self, key: str, what: str, *, holds: bool) -> None:
        if getattr(self, key) != type(self).model_fields[key].default and not holds:
            conflict(key, f"is only for {what}; ask for that, or leave it out")


def strictest(method: str, codec: str) -> Guarantee:
    """The strictest guarantee that a method with a codec keeps; of what is not said, the exact one."""
    if method in LOCAL or method == "asynchronous":
        return "relaxed"
    if codec in {"auto", "none"}:
        return "exact"
    return "near" if codec in _NEAR_CODECS else "relaxed"


def spell_communication(text: str) -> dict[str, Any] | None:
    """The mapping that a text stands for: a guarantee, a method, a codec, or a method and a codec."""
    parts = [word.strip() for word in text.split("+")]
    if parts == ["auto"]:
        return {}
    if len(parts) == 1 and parts[0] in GUARANTEES:
        return {"guarantee": parts[0]}
    if len(parts) == 1 and _is_codec(parts[0]) and parts[0] not in _METHODS:
        return {"codec": parts[0]}
    keys = ("method", "codec")
    return dict(zip(keys, parts, strict=False)) if all(parts) and len(parts) <= len(keys) else None


def _widen(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    spelt = spell_communication(value)
    if spelt is None:
        raise PydanticCustomError("not_communication", "expected communication")
    for key in ("method", "codec"):
        word = spelt.get(key, "auto")
        if word in GUARANTEES:
            conflict(key, f"{word} is a guarantee, no {key}; write {{guarantee: {word}, ...}}")
        is_known = _is_codec(word) if key == "codec" else word in _METHODS
        if word != "auto" and not is_known:
            known = _METHODS if key == "method" else codec_names()
            conflict(key, f"there is no {key} {word!r}; {did_you_mean(word, known)}")
    return spelt


def codec_names() -> tuple[str, ...]:
    """Codecs that a job can name: built in, or registered by a package."""
    return tuple(dict.fromkeys((*_CODECS, *known_names(CODECS))))


def _is_codec(word: str) -> bool:
    return word in _CODECS or bool(re.fullmatch(OWN_CODE, word)) or word in codec_names()


def text_pattern(codecs: Iterable[str] = _CODECS) -> str:
    """Regular expression of the texts that ``spell_communication`` takes, with these codecs."""
    packed = "|".join([*codecs, OWN_CODE.strip("^$")])
    others = "|".join((*_METHODS, *GUARANTEES, "auto"))
    return rf"^\s*({others}|{packed})(\s*\+\s*({packed}))?\s*$"


_Text = Annotated[
    str,
    Field(
        pattern=text_pattern(),
        json_schema_extra={"patternErrorMessage": "a method and a codec such as 'direct + int8'"},
    ),
]
CommunicationField = Annotated[
    CommunicationSpec,
    BeforeValidator(
        _widen, json_schema_input_type=MethodName | Guarantee | Auto | _Text | CommunicationSpec
    ),
]
"""Communication as a word (``auto``, ``near``, ``ring``), as ``direct + int8``, or as a mapping."""
