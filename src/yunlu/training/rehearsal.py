"""Rehearsal: a job's real step on fake tensors, for any number of workers, before anyone pays.

Fake tensors have shapes and no values: the model is built, parallelised, run forward and backward, and
updated as in training, by the code that trains, in a process group whose messages go nowhere. Found this
way: the peak memory of each worker by what takes it, and every error of shape, divisibility, device or
sharding. Not found: numbers, hangs, speed, fragmentation, and the buffers of communication libraries.

The second step is measured. In the first one the optimiser makes its state, and DTensor derives its
sharding rules on whole fake tensors, which no worker would hold.

``python -m yunlu.training.rehearsal`` reads a job and a plan from its standard input.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_parameters
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from yunlu.core.errors import ModelError, RehearsalError, YunluError
from yunlu.core.limits import decode_json
from yunlu.planning.layouts import AXES, Layout
from yunlu.planning.plan import Plan, RankRehearsal, Rehearsal
from yunlu.spec.job import Job
from yunlu.training.data.batches import lengths_of
from yunlu.training.device import CPU, accelerator_kind, is_accelerator
from yunlu.training.engine import make_average, make_optimizer, wrap_model
from yunlu.training.memory.peak import LiveBytes
from yunlu.training.memory.recompute import apply_recompute
from yunlu.training.model_profiler import blank_job, fake_values
from yunlu.training.models.adapter import add_adapter
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.parallel.p2p_groups import P2PGroup, P2PGroups
from yunlu.training.parallel.p2p_transport import P2PTransport
from yunlu.training.parallel.stage_transport import PendingReceive, StageMessage, StageTransport
from yunlu.training.parallel.tensor_parallel import HeadInput, multiply_with_head
from yunlu.training.parallel.world import World
from yunlu.training.precision import Precision
from yunlu.training.single_worker import SingleCommunication
from yunlu.training.tasks.task import collate_for, open_task

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from typing import Self

    from yunlu.training.parallel.tensor_parallel import LogitsHandling
    from yunlu.training.single_worker import WrappedModel
    from yunlu.training.tasks.task import Batch, Samples, Task


def _most_micros(layout: Layout) -> int:
    """Micro-batches after which nothing new is held.

    The second one finds the gradients of the first. GPipe keeps all; a stage of the other schedules as
    many as there are stages, and again as many beside the gradients.
    """
    if layout.pp == 1:
        return 2
    return sys.maxsize if layout.schedule == "gpipe" else 2 * layout.stages


def rehearse(job: Job, plan: Plan) -> Rehearsal:
    """Rehearse a step of the plan on every kind of worker that it has; raises what training would raise."""
    began_s = process_time()
    task = open_task(job.task)
    splits = task.load(job)
    batch = _largest_batch(task, splits.train, plan)
    device = _fake_device(plan)
    if plan.device != CPU.type:
        _check_devices(job, plan, task, batch)
    ranks: list[RankRehearsal] = []
    sent: _Sent = {}
    with _fake_group(plan):
        for rank in _kinds_of_ranks(plan):
            with _explained(rank, plan):
                world = _make_world(plan, device, rank)
                ranks.append(_rehearse_rank(job, plan, world, task, batch, sent=sent))
    return Rehearsal(
        ranks=tuple(ranks),
        kernels=device.type,
        cpu_s=process_time() - began_s,
        samples=batch.samples,
    )


def _kinds_of_ranks(plan: Plan) -> list[int]:
    """The first worker of each pipeline stage: other axes split evenly, and the first holds the most."""
    layout = plan.layout
    stages: dict[int, int] = {}
    for rank in range(layout.world):
        stages.setdefault(layout.place_of(rank).pp, rank)
    return [stages[number] for number in sorted(stages)]


def _fake_device(plan: Plan) -> torch.device:
    """The plan's own kind of device where this process has one: its kernels decide what is kept.

    The CPU's attention in one kernel stands in for that of a device for whose fake tensors torch has none.
    """
    kind = accelerator_kind()
    if kind is None or kind != plan.device:
        return CPU
    device = torch.device(kind, 0)
    return device if _fuses_attention(device) else CPU


def _fuses_attention(device: torch.device) -> bool:
    """Whether torch takes one kernel for attention among fake tensors of this device."""
    with FakeTensorMode(allow_non_fake_inputs=True), _KernelNames() as kernels:
        query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    return any("attention" in name for name in kernels.names)


def _largest_batch(task: Task, samples: Samples, plan: Plan) -> Batch:
    """A micro-batch of the longest samples."""
    lengths = lengths_of(samples)
    count = len(samples)
    if lengths is None:
        order = range(min(plan.micro_batch, count))
    else:
        totals = lengths.reshape(len(lengths), -1).sum(axis=1)
        order = (-totals).argsort(kind="stable")[: plan.micro_batch].tolist()
    chosen = [samples[int(index)] for index in order]
    full = [chosen[number % len(chosen)] for number in range(plan.micro_batch)]
    return collate_for(task, plan.padding)(full)


def _check_devices(job: Job, plan: Plan, task: Task, batch: Batch) -> None:
    """One forward pass with the model on another device than the tensors that its code makes on the host.

    The device of the rehearsal may be the host itself, where such tensors would not be noticed.
    """
    where = torch.device("meta")
    with _explained(0, plan, only=_MIXED), FakeTensorMode(allow_non_fake_inputs=True):
        with where:
            model = _build(job, task)
            inputs = _make_fake(batch)
        with _RehearsedBytes():
            task.loss(model, inputs)


_MIXED = re.compile(r"two (different )?devices")


@contextmanager
def _fake_group(plan: Plan) -> Generator[None]:
    """A default process group of all workers whose collectives return at once."""
    if plan.layout.is_single:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - slow

    dist.init_process_group("fake", rank=0, world_size=plan.layout.world, store=FakeStore())
    plain = {name: getattr(DeviceMesh, name) for name in _MESH_MAKERS}
    for name, make in plain.items():
        setattr(DeviceMesh, name, _with_real_numbers(make))
    fsdp: Any = fsdp_parameters
    chunk = fsdp._chunk_with_empty
    fsdp._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        fsdp._chunk_with_empty = chunk
        for name, make in plain.items():
            setattr(DeviceMesh, name, make)
        dist.destroy_process_group()


class _Chunks:
    """Chunks of a tensor, made when they are asked for: of 512, FSDP2 takes two."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // count)

    def __getitem__(self, number: int) -> Tensor:
        start = number * self._size
        left = self._tensor.size(self._dim) - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


_MESH_MAKERS = ("__init__", "__getitem__", "_concatenate", "_flatten")


def _with_real_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
    """Meshes are made by computing with ranks."""

    def made(*args: Any, **more: Any) -> Any:
        with _no_modes():
            return make(*args, **more)

    return made


@contextmanager
def _explained(rank: int, plan: Plan, *, only: re.Pattern[str] | None = None) -> Generator[None]:
    """Errors of a step as errors of the job; ``only`` those that match."""
    try:
        yield
    except YunluError:
        if only is None:
            raise
    except Exception as error:
        where = "" if plan.layout.is_single else f" on worker {rank} of {plan.layout.world}"
        reason = " ".join(str(error).split())[:300]
        if only is not None and only.search(reason) is None:
            return
        if _needs_values(error):
            raise RehearsalError(
                f"The step cannot be rehearsed{where}: {type(error).__name__}: {reason}",
                hint="It depends on values, or on an operator whose shapes torch does not know; "
                "it may train all the same.",
            ) from error
        raise ModelError(
            f"The step fails{where} under {plan.layout}: {type(error).__name__}: {reason}",
            hint="The same step would fail in training: change the model, or the layout.",
        ) from error


def _needs_values(error: BaseException) -> bool:
    """Whether fake tensors are to blame, or the operators that do not know them."""
    causes: list[BaseException] = []
    while error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__ or error
    return any(isinstance(cause, _FAKE_ERRORS) for cause in causes)


_FAKE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    NotImplementedError,
)


def _rehearse_rank(
    job: Job, plan: Plan, world: World, task: Task, batch: Batch, *, sent: _Sent
) -> RankRehearsal:
    memory = _RehearsedBytes()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    head = _RehearsedHead() if world.layout.tp > 1 else contextlib.nullcontext()
    with fake, torch.device(world.device), head, memory:
        step = _RehearsedStep(job, plan, task, world, memory=memory, sent=sent)
        micro = _make_fake(batch)
        step.know_ids(micro.inputs, batch.inputs)
        micros = [micro] * step.micros
        step.run(micros[: world.layout.stages])
        memory.forget_peak()
        step.run(micros)
        step.close()
    return RankRehearsal(
        rank=world.rank, peak_bytes=memory.peak, phase=memory.peak_phase, parts=memory.parts
    )


def _make_fake(batch: Batch) -> Batch:
    return replace(batch, inputs=fake_values(batch.inputs), targets=fake_values(batch.targets))


def _make_world(plan: Plan, device: torch.device, rank: int) -> World:
    layout = plan.layout
    if layout.is_single:
        return _RehearsedWorld(layout=layout, device=device)
    names = tuple(axis for axis in AXES if layout.size_of(axis) > 1)
    shape = tuple(layout.size_of(axis) for axis in names)
    _set_rank(rank)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return _RehearsedWorld(layout=layout, rank=rank, device=device, mesh=mesh)


def _set_rank(rank: int) -> None:
    """Speak for another worker: the groups of a mesh are made for the rank of the default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - slow

    if dist.get_rank() == rank:
        return
    size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


class _RehearsedWorld(World):
    """Meshes are made of real numbers, and slicing one makes another."""

    def axis(self, *names: str) -> DeviceMesh | None:
        """As ``World.axis``."""
        with _no_modes():
            return super().axis(*names)

    def group(self, *names: str) -> Any:
        """As ``World.group``."""
        with _no_modes():
            return super().group(*names)

    def wait_for(self, work: dist.Work, *, on_device: bool | None = None) -> None:
        """Nothing is under way, and nothing ever completes."""


@contextmanager
def _no_modes() -> Generator[None]:
    with unset_fake_temporarily(), torch.device(CPU):
        yield


class _RehearsedStep:
    """A worker's model and optimiser, and the phases of a step as the engine has them.

    Without what reads values: the guard's verdict, clipping by the norm, loss scaling, gradient noise.
    """

    def __init__(
        self, job: Job, plan: Plan, task: Task, world: World, *, memory: LiveBytes, sent: _Sent
    ) -> None:
        self.task, self.memory = task, memory
        memory.phase = "weights"
        self._largest_ids: dict[int, int] = {}
        model = _build(job, task)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._check_ids)
        apply_recompute(model, plan.recompute, share=plan.recompute_share)
        self.wrapped: WrappedModel = wrap_model(model, world, _NoCommunication(plan))
        pipeline: Any = getattr(self.wrapped, "_pipeline", None)
        if pipeline is not None:
            pipeline.use_transport(_make_transport(sent, pipeline.rank, world.device))
        self.optimizer, self._release = make_optimizer(job, plan, model, self.wrapped.optimized)
        self._model, decay = model, job.train.ema
        memory.phase = "averaged weights" if decay else memory.phase
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copying a fake tensor asks for its address
            self._average = make_average(model, decay) if decay else None
        name = "bf16" if plan.precision in {"fp16", "fp8"} else plan.precision
        self._precision = Precision(
            "fp32" if name == "tf32" else name,
            world.device,
            keeps_lowered_weights=plan.layout.fsdp == 1,
        )
        self.micros = min(plan.accumulation, _most_micros(plan.layout))

    def run(self, micros: Sequence[Batch]) -> None:
        """One step."""
        memory, wrapped = self.memory, self.wrapped
        memory.phase = "activations"
        with wrapped.step_context():
            wrapped.accumulate(
                micros, self._loss_of, self._backward, forward=self._precision.forward
            )
        wrapped.finish()
        memory.assign("gradients", (weight.grad for weight in wrapped.leaves))
        memory.phase = "update"
        self.optimizer.step()
        wrapped.publish()
        if self._average is not None:
            self._average.update_parameters(self._model)
        memory.assign("optimiser state", _state_of(self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)
        wrapped.drop_gradients()

    def know_ids(self, fake: Any, real: Any) -> None:
        """Remember the largest number in each tensor: fake ones have none."""
        pairs = zip(tree_iter(fake), tree_iter(real), strict=True)
        for tensor, values in pairs:
            if isinstance(values, Tensor) and values.dtype == torch.int64 and values.numel():
                with _no_modes():
                    self._largest_ids[_storage_of(tensor)] = int(values.max())

    def _check_ids(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids, entries = args[0] if args else None, getattr(module, "num_embeddings", 0)
        if not isinstance(ids, Tensor) or isinstance(ids, DTensor):
            return
        largest = self._largest_ids.get(_storage_of(ids), -1)
        if largest >= entries:
            raise ModelError(
                f"An embedding of {entries} entries is asked for number {largest} (the first is 0).",
                hint="Build the model for the vocabulary of the data.",
            )

    def close(self) -> None:
        """Remove the hooks from the weights."""
        self.wrapped.close()

    def _loss_of(self, model: nn.Module, micro: Batch) -> Tensor:
        loss, _ = self.task.loss(model, micro)
        return loss / max(micro.items, 1)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()


def _storage_of(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def _build(job: Job, task: Task) -> nn.Module:
    """The model without its trained weights, and with the adapter that training adds to them."""
    model = task.build(blank_job(job))
    allow_single_samples(model)
    if job.model.adapter is None:
        return model
    with _moves_skipped():
        return add_adapter(model, job.model.adapter)


@contextmanager
def _moves_skipped() -> Generator[None]:
    """Modules are where they belong, and torch cannot move some of fake tensors."""
    move: Any = nn.Module.to

    def stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return module

    nn.Module.to = stay  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.to = move


class _NoCommunication(SingleCommunication):
    """Torch's all-reduce, which the fake group answers."""

    def __init__(self, plan: Plan) -> None:
        del plan


def _state_of(optimizer: Any) -> Iterator[Any]:
    for state in optimizer.state.values():
        yield from tree_iter(state)


_Sent = dict[int, tuple[tuple[int, ...], torch.dtype]]
"""Shapes of the activations that rehearsed stages have sent, by tag."""


class _Sending:
    def wait(self) -> None:
        """Nothing is under way."""

    def is_completed(self) -> bool:
        """At once."""
        return True


class _RehearsedGroup(P2PGroup):
    """Sends to nobody."""

    def send(self, tensor: Tensor) -> Any:
        """Nothing."""
        del tensor
        return _Sending()

    def receive(self, buffer: Tensor) -> Any:
        """Nothing."""
        del buffer
        return _Sending()


class _AnyP2PGroup(dict[Any, P2PGroup]):
    """To everybody."""

    def __missing__(self, key: Any) -> P2PGroup:
        return _RehearsedGroup(None, 0)

    def get(self, key: Any, default: Any = None) -> Any:
        """As if all were there."""
        del default
        return self[key]


def _make_transport(sent: _Sent, rank: int, device: torch.device) -> StageTransport:
    if not is_accelerator(device):
        return _RehearsedTransport(sent, rank, device)
    return _RehearsedP2PTransport(sent, rank, device)


class _RehearsedP2PTransport(P2PTransport):
    """As ``_RehearsedTransport``, for the buffers that P2P groups need."""

    def __init__(self, sent: _Sent, rank: int, device: torch.device) -> None:
        p2p_groups = P2PGroups(outgoing=_AnyP2PGroup(), incoming=_AnyP2PGroup())
        super().__init__(None, rank, device, p2p_groups)
        self._sent = sent

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Record the shape; headers and flags are no tensors of the device."""
        if to == self._rank:
            super().send(tensor, to, tag)
        elif is_accelerator(tensor.device):
            self._sent[tag] = tuple(tensor.shape), tensor.dtype
            super().send(tensor, to, tag)

    def expect(self, like: Tensor, source: int, tag: int) -> PendingReceive:
        """A buffer, when it would be posted."""
        if source != self._rank and not is_accelerator(like.device):
            return PendingReceive(like, _Sending())
        return super().expect(like, source, tag)

    def _receive_headers(self, messages: Sequence[StageMessage], answer: Any) -> None:
        """Nothing arrives before it is taken."""

    def _has_answer(self, tag: int) -> bool:
        del tag
        return False

    def _make(self, tag: int) -> Tensor:
        shape, dtype = self._sent.get(tag) or next(iter(self._sent.values()))
        return torch.empty(shape, dtype=dtype, device=self._device)


class _RehearsedTransport(StageTransport):
    """Keeps what is sent as long as training would; what is received has the shape that was sent."""

    def __init__(self, sent: _Sent, rank: int, device: torch.device) -> None:
        super().__init__(None, rank, device)
        self._sent = sent

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Record the shape."""
        if to == self._rank:
            super().send(tensor, to, tag)
            return
        if tensor.is_floating_point():  # not a header
            self._sent[tag] = tuple(tensor.shape), tensor.dtype
        self._sending.setdefault((to, tag), []).append((_Sending(), tensor.contiguous()))

    def expect(self, like: Tensor, source: int, tag: int) -> PendingReceive:
        """The buffer as it is."""
        if source == self._rank:
            return super().expect(like, source, tag)
        return PendingReceive(torch.empty_like(like).detach(), _Sending())

    def listen(
        self, messages: Sequence[StageMessage], gradients: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Nothing arrives before it is taken."""

    def take(self, message: StageMessage) -> Tensor:
        """An activation of the shape that its stage has sent; interleaved stages send later, but alike."""
        if message.source == self._rank:
            return super().take(message)
        shape, dtype = self._sent.get(message.tag) or next(iter(self._sent.values()))
        return torch.empty(shape, dtype=dtype, device=self._device)


def _one(tensor: Tensor) -> bool | int | float:
    """What a healthy step reads: flags are set, and counts are above 0."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _have_same_shape(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape


_READ: dict[Any, Any] = {
    torch.ops.aten._local_scalar_dense.default: _one,
    torch.ops.aten.equal.default: _have_same_shape,
}


_DEVICE: Any = torch.ops.prim.device.default


class _RehearsedBytes(LiveBytes):
    """Also answers whoever reads the value of a fake tensor; one mode, since each costs every operator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(args[0] if args else None, FakeTensor):
            if func is _DEVICE:  # asked about twice as often as operators are called
                return args[0].fake_device
            if func in _READ:
                return _READ[func](*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _RehearsedHead(TorchFunctionMode):
    """Does what ``HeadInput`` does: a fake tensor cannot become a tensor of another class."""

    def __enter__(self) -> Self:
        self._plain_of: Any = HeadInput.of
        self._handling: LogitsHandling | None = None

        def remember(x: Tensor, handling: LogitsHandling) -> Tensor:
            self._handling = handling
            return x

        HeadInput.of = remember  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        HeadInput.of = self._plain_of
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        is_head = func is nn.functional.linear and isinstance(args[1], DTensor)
        if is_head and not isinstance(args[0], DTensor) and self._handling is not None:
            return multiply_with_head(*args, handling=self._handling, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _KernelNames(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def main() -> int:
    """Rehearse the job and plan on the standard input; errors are printed as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            given = decode_json(sys.stdin.buffer.read())
            job, plan = Job.model_validate(given["job"]), Plan.model_validate(given["plan"])
            answer = {"found": rehearse(job, plan).model_dump(mode="json")}
        except YunluError as error:
            details = {"code": error.code, "message": error.message, "hint": error.hint}
            answer = {"error": details}
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
