"""A narrow proxy of a transformer: search there, transfer the settings to the wide model.

Our transformers can be parametrised so that one learning rate suits all widths (µP, Yang et al. 2022,
arXiv 2203.03466; ``training/models/transformer.py``). The proxy has the depth, data and steps of its target and a
fraction of its width; the target is then trained with ``model.args.mup_base`` at the proxy's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.spec.job import LayoutSpec
from yunlu.spec.task_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.spec.job import Job
    from yunlu.tuning.values import Params

_KINDS = ("causal", "classifier")
"""Of our transformers, those that have a proxy."""
"""Those whose ``transformer`` takes ``mup_base``."""
_WIDTH, _HEADS = 128, 4
"""Defaults of our transformers."""
_NARROWER = 4
_NARROWEST = 32
"""Narrower proxies are too noisy (ibid., section 9)."""

_BOUND = {
    "task": "it is what the target does",
    "model.name": "another model is not narrower, but other",
    "model.args.width": "it is what tells the proxy from its target",
    "model.args.heads": "it follows the width",
    "model.args.layers": "rates are carried over between widths, not depths",
    "model.args.mup_base": "it is the proxy's width",
    "model.args.mup_heads": "it follows the proxy's width",
    "train.optimizer.name": "rates are carried over between widths, not optimisers",
    "devices": "the target is larger",
    "layout": "the target is larger",
}
_DOUBTFUL = {
    "model.args.dropout": "larger models need more of it",
    "train.optimizer.weight_decay": "larger models may need another",
    "train.l1": "larger models may need another",
    "train.l2": "larger models may need another",
    "train.label_smoothing": "larger models may need another",
    "train.epochs": "larger models learn the data by heart sooner",
}
"""Regularisation depends on the model size (ibid., table 2)."""


def make_proxy(job: Job, *, width: int | None = None) -> Job:
    """The job with a narrower transformer: ``width``, or a quarter of the target's.

    Heads keep their width and become fewer; where that does not come out even, they become narrower.

    Raises:
        JobError: The job has no model of which there is a proxy, or none of this width.
    """
    _check_job(job)
    target, heads = _size(job)
    chosen = _choose_width(target, heads) if width is None else width
    if not 0 < chosen < target:
        raise JobError(
            f"A proxy is narrower than its target: {chosen} is not below model.args.width {target}.",
            hint=f"use a width of {_NARROWEST} or more, such as {max(target // _NARROWER, 1)}",
        )
    args = {**job.model.args, "width": chosen, "heads": _choose_heads(chosen, target, heads)}
    changes = {
        "name": f"{job.name or 'job'}-proxy"[:63],
        "model": job.model.model_copy(update={"args": args}),
        # The target may need to be split; the proxy fits where one of its parts does.
        "layout": LayoutSpec(),
    }
    return job.model_copy(update=changes)


def carry_over(params: Params, proxy: Job, target: Job) -> Params:
    """The setting for the target that corresponds to ``params`` on the proxy.

    Raises:
        JobError: A field is among them that only holds for the proxy.
    """
    check_fields(params)
    if "mup_base" in target.model.args:  # its rates are for another width, and so were the proxy's
        return dict(params)
    width, heads = _size(proxy)
    return {**params, "model.args.mup_base": width, "model.args.mup_heads": heads}


def check_fields(fields: Iterable[str]) -> None:
    """Refuse fields that cannot be searched on a proxy."""
    for field in fields:
        for bound, why in _BOUND.items():
            if field == bound or field.startswith(f"{bound}."):
                raise JobError(
                    f"{field} cannot be searched on a proxy: {why}.",
                    hint="remove it from search.space, or search without a proxy",
                )


def find_doubts(fields: Iterable[str]) -> list[str]:
    """Warnings for fields that may not transfer from a proxy."""
    return [
        f"{field} may not carry over to the target: {_DOUBTFUL[field]}"
        for field in fields
        if field in _DOUBTFUL
    ]


def _check_job(job: Job) -> None:
    model = job.model
    if traits_of(job.task).transformer not in _KINDS or model.name != "transformer":
        raise JobError(
            f"There is no proxy for {model.name} in {job.task}.",
            hint="proxies are of our own transformer, in language-modeling and text-classification",
        )
    if model.weights is not None or model.adapter is not None:
        raise JobError(
            "A proxy replaces a model trained from scratch, not trained weights or an adapter.",
            hint="remove model.weights and model.adapter, or search without a proxy",
        )
    if not job.train.optimizer.traits.has_mup:
        raise JobError(
            f"Rates do not carry over from a proxy with {job.train.optimizer.name}.",
            hint="set train.optimizer to adamw, or search without a proxy",
        )


def _size(job: Job) -> tuple[int, int]:
    width, heads = job.model.args.get("width", _WIDTH), job.model.args.get("heads", _HEADS)
    if not (isinstance(width, int) and isinstance(heads, int) and width > 0 and heads > 0):
        raise JobError(f"model.args: width {width!r} and heads {heads!r} are no sizes.")
    return width, heads


def _choose_width(target: int, heads: int) -> int:
    unit = max(target // heads, 2)
    aim = max(target / _NARROWER, _NARROWEST)
    # In whole heads where one is narrow enough, else in as many narrower ones.
    chosen = round(aim / unit) * unit if unit <= aim else round(aim / (2 * heads)) * 2 * heads
    if chosen >= target:
        raise JobError(
            f"model.args.width {target} is small already: a proxy would tell no less by costing less.",
            hint="search without a proxy",
        )
    return max(chosen, 2 * heads)


def _choose_heads(width: int, target: int, heads: int) -> int:
    head_width = target // heads
    if head_width and width % head_width == 0:
        return width // head_width
    if width % (2 * heads) == 0:
        return heads
    raise JobError(
        f"A proxy of width {width} divides neither into heads of {head_width} nor into {heads} heads "
        "of even width.",
        hint=f"use a multiple of {head_width} or of {2 * heads}",
    )
