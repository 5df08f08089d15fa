"""One argument of another tool: our keys for it, how its value converts, what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""The arguments that stand beside one another, by the names of their tool."""
Taken = dict[str, Any]
"""Our dotted keys and their values."""
Take = Callable[[Any, Settings], Taken]


class NotTakenError(Exception):
    """A value that has no counterpart, though its key has one; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """An argument of another tool; without ``keys`` it has no counterpart, and ``remark`` says why."""

    tool: str
    name: str
    """As the tool spells it; what stands in a section, or belongs to a callback, after a dot."""
    keys: tuple[str, ...] = ()
    take: Take = lambda _value, _settings: {}
    remark: str = ""
    """What differs, where the value is not simply taken over."""

    def convert(self, value: Any, settings: Settings) -> Taken:
        """Our keys for a value; none where it only says the default. May raise ``NotTakenError``."""
        if not self.keys:
            raise NotTakenError(self.remark)
        if is_unsaid(value):
            return {}
        try:
            return self.take(value, settings)
        except (TypeError, ValueError, ArithmeticError):
            # What stands in another tool's file may be of any kind.
            raise NotTakenError(f"{value!r:.60} is not a value that is known of it") from None


def is_unsaid(value: Any) -> bool:
    """Nothing, or DeepSpeed's ``auto``: whoever reads the file decides."""
    return value is None or (isinstance(value, str) and value in {"auto", ""})


@dataclass(frozen=True, slots=True)
class Tool:
    """Short forms for the rows of one tool's table."""

    name: str

    def same(self, name: str, key: str, remark: str = "") -> Counterpart:
        """The value as it stands."""
        return self.row(name, key, take=lambda value, _: {key: value}, remark=remark)

    def number(self, name: str, key: str, remark: str = "") -> Counterpart:
        """A number; zero, where the tool means "none" by it, and minus one say nothing."""

        def take(value: Any, _: Settings) -> Taken:
            return {key: value} if number(value) > 0 else {}

        return self.row(name, key, take=take, remark=remark)

    def switch(
        self, name: str, key: str, on: Any, off: Any = None, remark: str = ""
    ) -> Counterpart:
        """``on`` where it is true; ``off``, if there is one, where it is false."""

        def take(value: Any, _: Settings) -> Taken:
            if not isinstance(value, bool):
                raise NotTakenError("expected true or false")
            chosen = on if value else off
            return {} if chosen is None else {key: chosen}

        return self.row(name, key, take=take, remark=remark)

    def word(
        self, name: str, key: str, value_map: Mapping[Any, Any], remark: str = "", *, why: str = ""
    ) -> Counterpart:
        """A word by a table; another has no counterpart."""

        def take(value: Any, _: Settings) -> Taken:
            plain = value.lower() if isinstance(value, str) else value
            if plain not in value_map:
                raise NotTakenError(why or f"{value!r} is not offered")
            return {} if value_map[plain] is None else {key: value_map[plain]}

        return self.row(name, key, take=take, remark=remark)

    def row(self, name: str, *keys: str, take: Take, remark: str = "") -> Counterpart:
        """With a conversion of its own."""
        return Counterpart(tool=self.name, name=name, keys=keys, take=take, remark=remark)

    def none(self, why: str, *names: str) -> list[Counterpart]:
        """Arguments without a counterpart, for one reason."""
        return [Counterpart(tool=self.name, name=name, remark=why) for name in names]


def number(value: Any) -> float:
    """A number, also where it is written as text, as Hydra and argparse do."""
    if isinstance(value, bool):
        raise NotTakenError("expected a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise NotTakenError(f"expected a number, got {value!r}") from None


def whole(value: Any) -> int:
    """A whole number."""
    return int(number(value))


def count_or(settings: Settings, name: str, default: int) -> int:
    """A whole number beside this one, or what holds without it."""
    value = settings.get(name)
    return default if is_unsaid(value) or isinstance(value, bool) else max(whole(value), 1)


def global_batch(per_device: Any, accumulated: int, devices: int) -> Taken:
    """The batch of one step over all devices, and the part of it that is in memory at once."""
    micro = whole(per_device)
    taken: Taken = {"train.batch": micro * accumulated * devices}
    if accumulated > 1:
        taken["train.micro_batch"] = micro
    return taken


def metric_name(value: Any) -> str:
    """``eval_loss``, ``val_loss`` and ``validation/loss`` are ``loss`` here; ``acc`` is ``accuracy``."""
    name = str(value)
    for prefix in ("eval_", "eval/", "validation_", "validation/", "valid_", "val_", "val/"):
        name = name.removeprefix(prefix)
    return {"acc": "accuracy", "sparse_categorical_accuracy": "accuracy"}.get(name, name)


RUNS = "a run has its own directory in YUNLU_HOME (./yunlu-runs): log, checkpoints, model, report"
LOGGED = "every step is logged, with loss, rate, gradient norm and times"
SHOWN = "the terminal shows a bar where there is a terminal; --json prints events"
TASK_LOSS = "the loss is that of the task; from Python: yunlu.train(model=..., loss=...)"
TASK_METRICS = "each task has its metrics; from Python: yunlu.train(model=..., metrics={...})"
HUB = "nothing is uploaded; the exported model is a directory that you can upload"
MEMORY = "the plan fits the run into memory by itself: train.micro_batch, train.recompute, layout"
LOADING = "the loading of data is planned and measured; only the number of processes is a key: train.workers"
TRANSPORT = "communication is measured and chosen: see the section communication"
RESUMED = "a stopped run goes on with: yunlu resume RUN"
NO_CODE = "Python objects do not stand in a job file"
EVALUATED = "evaluation takes the training's micro-batch; it does not change the result"
QUICK = "for a quick trial: --set data.limit=200 --set train.epochs=1"
FINITE = "train.guard skips steps that are not finite, and rolls back"
COMPILER = "train.compile has no options; auto compiles only where it pays back within the run"
SCALED = "the scale of fp16 losses is found while training, and kept in the checkpoint"
