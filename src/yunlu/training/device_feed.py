"""Batches on their way to an accelerator: fetched, pinned and copied while it computes the step before."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yunlu.training.determinism import hold_host_random, return_host_random
from yunlu.training.device import is_accelerator, record_event
from yunlu.training.tasks.task import Batch, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.training.determinism import HostRandom


class DeviceFeed:
    """The steps of an iterator, for an accelerator; the next one is fetched ahead.

    Call ``prepare`` when the device has all the work of a step, before the host waits for it: fetching
    then takes no time, and the copy of the first micro-batch is made beside the computation. The others
    follow one by one, so that only two micro-batches take the device's memory. The device has streams.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device) -> None:
        self._steps, self._device = steps, device
        self._stream = torch.Stream(device)
        self._next: list[Batch] | None = None
        self._error: Exception | None = None
        self._random: HostRandom | None = None

    def __iter__(self) -> DeviceFeed:
        return self

    def __next__(self) -> list[Batch]:
        self.prepare()
        step, error = self._next, self._error
        self._next = self._error = self._random = None
        if error is not None:
            raise error
        assert step is not None
        return step

    def prepare(self) -> None:
        """Fetch the next step, unless it is there; its errors are raised where it is taken."""
        if self._random is not None:
            return
        self._random = hold_host_random()
        try:
            self._next = self._send(next(self._steps))
        except Exception as error:  # noqa: BLE001 - raised by ``__next__``
            self._error = error

    @property
    def random_before(self) -> HostRandom | None:
        """The host's random state before the step that was fetched ahead: a checkpoint holds this one."""
        return self._random

    def drop(self) -> None:
        """Undo the draws of the step that was fetched ahead: another feed takes over."""
        if self._random is not None:
            return_host_random(self._random)
        self._next = self._error = self._random = None

    def _send(self, step: list[Batch]) -> list[Batch]:
        copies = StepCopies(step, self._device, self._stream)
        copies.begin(0)
        return copies.batches()


class StepCopies:
    """Copies of the micro-batches of a step to the device, each begun when the one before is taken."""

    def __init__(self, micros: Sequence[Batch], device: torch.device, stream: torch.Stream) -> None:
        self._micros = [_pinned(micro) for micro in micros]
        self._device, self._stream = device, stream
        self._begun: dict[int, tuple[Batch, torch.Event]] = {}

    def batches(self) -> list[Batch]:
        """The micro-batches, which arrive when they are moved to the device."""
        return [
            ArrivingBatch(
                **{entry.name: getattr(micro, entry.name) for entry in fields(Batch)},
                copies=self,
                index=index,
            )
            for index, micro in enumerate(self._micros)
        ]

    def begin(self, index: int) -> None:
        """Begin to copy a micro-batch, if there is one."""
        if index >= len(self._micros) or index in self._begun:
            return
        with self._stream:
            moved = self._micros[index].to(self._device)
            self._begun[index] = moved, record_event(self._device)

    def take(self, index: int) -> Batch:
        """A micro-batch on the device; the computation waits for its copy, the host does not."""
        self.begin(index)
        moved, arrival = self._begun.pop(index)
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(arrival)

        def note_use(tensor: Tensor) -> Tensor:
            # Its memory belongs to the copying stream, which must not reuse it before this one is done.
            if is_accelerator(tensor.device):
                tensor.record_stream(computing)  # pyright: ignore[reportArgumentType] - any torch.Stream
            return tensor

        map_tensors(moved.inputs, note_use)
        map_tensors(moved.targets, note_use)
        self.begin(index + 1)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingBatch(Batch):
    """A micro-batch of the host whose copy to the device may be under way."""

    copies: StepCopies = field(repr=False, compare=False)
    index: int

    def to(self, device: torch.device) -> Batch:
        """The copy on the device."""
        return self.copies.take(self.index) if is_accelerator(device) else self


def _pinned(batch: Batch) -> Batch:
    return replace(
        batch,
        inputs=map_tensors(batch.inputs, _pin),
        targets=map_tensors(batch.targets, _pin),
    )


def _pin(tensor: Tensor) -> Tensor:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain else tensor
