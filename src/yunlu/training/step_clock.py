"""Where the time of a step went: computing, waiting for other workers, waiting for data.

On the CPU a worker that does not compute waits. On an accelerator the host only asks for work, and its own
clock tells nothing: events of the device mark where the computation begins and ends, and where the gradients
of other workers are there. They are read after the host has waited for the loss.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from yunlu.training.device import elapsed_s, has_streams, record_event

if TYPE_CHECKING:
    import torch

    from yunlu.training.loop import Step


class StepClock(Protocol):
    """Splits the time of a step."""

    def exchanged(self) -> None:
        """Everything was asked for that waits for gradients of other workers."""
        ...

    def split(self, step: Step, thread_s: float) -> None:
        """Split ``compute_s``, which is the whole step; ``thread_s``: seconds that this thread computed."""
        ...


class HostClock:
    """Of a worker on the CPU among others: collectives run in other threads."""

    def exchanged(self) -> None:
        """The time of the thread tells it."""

    def split(self, step: Step, thread_s: float) -> None:
        """While this thread does not compute, it waits."""
        step.wait_s = max(step.compute_s - thread_s, 0.0)
        step.compute_s -= step.wait_s


class DeviceClock:
    """Of a worker on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.Event] = []
        self._begun_at = self._fetched_at = 0.0

    def begin(self) -> float:
        """The device begins with a step; returns the time of the host."""
        self._events = [record_event(self._device, is_timed=True)]
        self._begun_at = self._fetched_at = perf_counter()
        return self._begun_at

    def end_compute(self, _begun_at: float) -> None:
        """All of forward and backward was asked for."""
        self._events.append(record_event(self._device, is_timed=True))

    def exchanged(self) -> None:
        """See ``StepClock``."""
        self._events.append(record_event(self._device, is_timed=True))

    def fetched(self) -> None:
        """The batches of the next step were fetched while the device computed this one."""
        self._fetched_at = perf_counter()

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward, once the host has waited for the device."""
        return elapsed_s(*self._events[:2]) if len(self._events) > 1 else 0.0

    def split(self, step: Step, thread_s: float) -> None:  # noqa: ARG002 - the thread waits for the device
        """By the events; a device that was done before the next batches were there waited for data."""
        if len(self._events) < 2:  # a step that was passed over
            return
        step.wait_s = elapsed_s(*self._events[1:3]) if len(self._events) > 2 else 0.0
        busy_s = self.compute_s + step.wait_s
        late_s = max(self._fetched_at - self._begun_at - busy_s, 0.0)
        step.data_s += late_s
        step.compute_s = max(step.compute_s - step.wait_s - late_s, 0.0)
        self._events = []


def make_step_clock(device: torch.device, *, is_single: bool) -> StepClock | None:
    """The clock of a worker; None for one alone on the CPU, which only computes."""
    if has_streams(device):
        return DeviceClock(device)
    return None if is_single else HostClock()
