"""Profile of any module: weights, operations and saved activations, counted with fake tensors.

Fake tensors have shapes but no values, so a model larger than this machine is built and differentiated
in seconds. A model whose control flow depends on values is run for real instead, on two samples.
``python -m yunlu.training.model_profiler`` reads a job from its standard input and prints the profile
as one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from yunlu.core.errors import ModelError, YunluError, missing_part
from yunlu.core.limits import read_json
from yunlu.core.value import Value
from yunlu.planning.models.hf_config import shape_from_config
from yunlu.planning.models.known_models import Own, own_adapter, own_transformer
from yunlu.planning.models.shape import ModelShape
from yunlu.spec.job import Job
from yunlu.training.data.batches import lengths_of
from yunlu.training.models.adapter import add_adapter
from yunlu.training.models.hf import is_hf, split_revision
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.pipeline_stages import why_not_split
from yunlu.training.parallel.tensor_parallel_plans import why_not_tensor
from yunlu.training.tasks.task import open_task

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.training.tasks.task import Batch, Samples, Task

_SAMPLES = 2
_MOST_WAYS = 64


class MeasuredShape(Value):
    """A measured model shape, and how it was measured."""

    shape: ModelShape
    how: Literal["fake", "real"] = "fake"
    note: str = ""
    """Why fake tensors were not enough; empty if they were."""
    seq: int = 1
    """Tokens of a measured sample; 1 if samples are not sequences."""
    train_samples: int = 0


def measure_job(job: Job) -> MeasuredShape:
    """Profile the model of a job on the first samples of its data; reads no weights."""
    task = open_task(job.task)
    splits = task.load(job)
    blank = blank_job(job)
    batch = task.collate([splits.train[index] for index in _typical_samples(splits.train)])
    profile = measure_model(lambda: _build(blank, task), task, batch, name=job.model.name)
    if profile.shape.kind != "measured":
        described = profile.shape.model_copy(update={"adapter": own_adapter(job.model.adapter)})
        profile = profile.model_copy(update={"shape": described})
    return profile.model_copy(update={"train_samples": len(splits.train)})


def blank_job(job: Job) -> Job:
    """The job without trained weights, which may be many gigabytes: shapes do not depend on them."""
    bare = job.model.model_copy(update={"pretrained": False, "weights": None})
    return job.model_copy(update={"model": bare})


def _typical_samples(samples: Samples) -> list[int]:
    """Indices of the first samples; of samples of varying length, those nearest to the mean."""
    lengths = lengths_of(samples)
    if lengths is None:
        return list(range(min(_SAMPLES, len(samples))))
    totals = lengths.reshape(len(lengths), -1).sum(axis=1)  # of a source and its target
    order = abs(totals - totals.mean()).argsort(kind="stable")
    return [int(index) for index in order[:_SAMPLES]]


def _build(job: Job, task: Task) -> nn.Module:
    model = task.build(job)
    allow_single_samples(model)
    if job.model.adapter is None or describe(model) is not None:
        return model
    return add_adapter(model, job.model.adapter)


def describe(model: nn.Module) -> ModelShape | None:
    """Shape of a model of known architecture: built-in, or Hugging Face's."""
    if is_hf(model):
        config: Any = model.config
        config_dict = {**config.to_dict(), "architectures": [type(model).__name__]}
        try:
            return shape_from_config(config_dict, where=type(model).__name__)
        except ModelError:
            return None  # no stack of equal blocks: measured instead
    if not isinstance(model, CausalTransformer | TransformerClassifier | Seq2SeqTransformer):
        return None
    embedding = model.embedding
    blocks = model.encoder if isinstance(model, Seq2SeqTransformer) else model.layers
    first: Any = blocks[0]
    width: int = embedding.token.embedding_dim
    kinds: dict[type[nn.Module], Own] = {
        CausalTransformer: "causal",
        TransformerClassifier: "classifier",
        Seq2SeqTransformer: "seq2seq",
    }
    head: Any = getattr(model, "head", None)
    return own_transformer(
        kinds[type(model)],
        vocabulary=embedding.token.num_embeddings,
        max_length=embedding.max_length,
        classes=head.out_features if isinstance(model, TransformerClassifier) else 0,
        width=width,
        layers=len(blocks),
        heads=width // first.attention.head_width,
        tied=head is None,
        positions="rotary" if embedding.position is None else "learned",
    )


def measure_model(
    build: Callable[[], nn.Module], task: Task, batch: Batch, *, name: str
) -> MeasuredShape:
    """Profile the model of ``build`` on one batch: with fake tensors, or for real if these fail."""
    try:
        with FakeTensorMode():
            faked = replace(
                batch, inputs=fake_values(batch.inputs), targets=fake_values(batch.targets)
            )
            return _measure(build(), task, faked, name=name)
    except YunluError:
        raise
    except Exception as error:  # noqa: BLE001 - user modules may do anything with fake tensors
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    profile = _measure(build(), task, batch, name=name)
    note = f"measured by a real pass over {batch.samples} samples: fake tensors failed ({why})"
    return profile.model_copy(update={"how": "real", "note": note})


def fake_values(value: Any) -> Any:
    """The same shapes without values; called under a ``FakeTensorMode``."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: fake_values(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(fake_values(item) for item in value)
    return value


def _measure(model: nn.Module, task: Task, batch: Batch, *, name: str) -> MeasuredShape:
    seq = _length(batch)
    described = describe(model)
    if described is not None:
        return MeasuredShape(shape=described.model_copy(update={"name": name}), seq=seq)
    model.train()
    weights = list(model.parameters())
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    with _plain_products(), _widths(model) as widths, counter, _saved_bytes(model) as saved:
        loss, _ = task.loss(model, batch)
        loss.backward()
    shape = ModelShape(
        name=name,
        kind="measured",
        layers=_stack(model),
        hidden=_typical(widths),
        tokens_per_sample=seq,
        causal=False,
        measured_parameters=sum(weight.numel() for weight in weights),
        measured_trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        measured_flops=max(counter.get_total_flops(), 1) / batch.samples,
        measured_activation_bytes=sum(saved.values()) / batch.samples,
        measured_ways=_tensor_ways(model),
        measured_stages=_stages(model),
    )
    return MeasuredShape(shape=shape, seq=seq)


@contextmanager
def _plain_products() -> Generator[None]:
    """Disable oneDNN: recurrent layers then consist of matrix products, which the counter knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own switch sets deprecated flags
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextmanager
def _saved_bytes(model: nn.Module) -> Generator[dict[int, int]]:
    """Bytes that autograd saves for the backward pass, by storage; each storage counts once."""
    weights = {_storage_id(weight) for weight in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        number = _storage_id(tensor)
        if number not in weights:
            storage = tensor.untyped_storage()
            saved[number] = storage.nbytes()
            alive.append(storage)  # its id must not be reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _storage_id(tensor: Tensor) -> int:
    """Identity of a storage: fake ones have no address."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


@contextmanager
def _widths(model: nn.Module) -> Generator[list[int]]:
    """Output widths of the layers with weights."""
    widths: list[int] = []

    def record(module: nn.Module, inputs: Any, result: Any) -> None:
        del module, inputs
        tensor = result[0] if isinstance(result, tuple) and result else result
        if isinstance(tensor, Tensor) and tensor.ndim > 1:
            is_image = tensor.ndim == 4  # channels come first there
            widths.append(int(tensor.shape[1 if is_image else -1]))

    leaves = [
        module
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    handles = [module.register_forward_hook(record) for module in leaves]
    try:
        yield widths
    finally:
        for handle in handles:
            handle.remove()


def _typical(widths: Sequence[int]) -> int:
    """The most frequent width; of several, the largest."""
    if not widths:
        return 1
    counts = Counter(widths)
    return max(counts, key=lambda width: (counts[width], width))


def _length(batch: Batch) -> int:
    """Tokens of one sample, if samples are sequences of ids; else 1."""
    if batch.tokens:
        return max(1, batch.tokens // batch.samples)
    inputs = list(batch.inputs.values() if isinstance(batch.inputs, dict) else batch.inputs)
    first = inputs[0] if inputs else None
    is_ids = isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_ids and first is not None else 1


def _stack(model: nn.Module) -> int:
    """Number of repeated blocks: the longest list of modules of one class, else layers with weights."""
    longest = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(
                type(child) for child in module if next(child.parameters(), None) is not None
            )
            longest = max(longest, *kinds.values()) if kinds else longest
    matrices = sum(weight.ndim > 1 for weight in model.parameters())
    return longest if longest > 1 else max(1, matrices)


def _tensor_ways(model: nn.Module) -> tuple[int, ...]:
    return (1, *(ways for ways in range(2, _MOST_WAYS + 1) if why_not_tensor(model, ways) is None))


def _stages(model: nn.Module) -> int:
    most = 1
    while most < _MOST_WAYS and why_not_split(model, most + 1) is None:
        most += 1
    return most


def _attention_forward(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    """FLOPs of scores and weighted sums; half of them with a causal mask."""
    del more
    pairs = math.prod(query[:-1]) * key[-2]
    is_causal = len(rest) > 1 and bool(rest[1])
    return pairs * (query[-1] + value[-1]) * (1 if is_causal else 2)


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any
) -> int:
    """Twice the forward pass; the kernel's recomputation is not counted."""
    del gradient, more
    return 2 * _attention_forward(query, key, value, *rest[2:])


def _grouped_products(first: Any, second: Any, *rest: Any, **more: Any) -> int:
    """FLOPs of grouped products: each row meets one expert."""
    del rest, more
    both = first[0] if len(first) == len(second) == 3 else 1
    return 2 * both * first[-2] * first[-1] * second[-1]


_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Operators missing in torch's own counter: CPU attention and grouped products.
_UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: _grouped_products,
    getattr(torch.ops.aten, _CPU_ATTENTION): _attention_forward,
    getattr(torch.ops.aten, f"{_CPU_ATTENTION}_backward"): _attention_backward,
}


def fetch_config(name: str) -> dict[str, Any]:
    """Download only the ``config.json`` of a model on the hub."""
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("transformers", "hf", f"The model {name}") from error
    try:
        repository, revision = split_revision(name)
        path = hf_hub_download(repository, "config.json", revision=revision)
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"hf:{name}: its config.json cannot be fetched from the hub: {reason}",
            hint="check the name and the network, or give the path of a downloaded model",
        ) from error
    return read_json(Path(path))


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the job on the standard input, or fetch a configuration; errors are printed as JSON."""
    parser = argparse.ArgumentParser(prog="python -m yunlu.training.model_profiler")
    parser.add_argument("--config", metavar="NAME", help="fetch the config.json of a model instead")
    name: str | None = parser.parse_args(argv).config
    # Libraries print; only the answer may reach the reader of our standard output.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = {"config": fetch_config(name)} if name else _answer()
        except YunluError as error:
            details = {"code": error.code, "message": error.message, "hint": error.hint}
            answer = {"error": details}
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return 0


def _answer() -> dict[str, Any]:
    job = Job.model_validate_json(sys.stdin.buffer.read())
    return {"found": measure_job(job).model_dump(mode="json")}


if __name__ == "__main__":
    sys.exit(main())
