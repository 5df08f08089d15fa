"""Resource request: minimum, maximum and multiple of a job's devices. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.value import Value

if TYPE_CHECKING:
    from yunlu.spec.job import Job

MANY = 1 << 20
"""More than any pool has: no bound."""


class ResourceRequest(Value):
    """Bounds on a job's devices."""

    least: int
    most: int
    requested: int
    """Number of devices under policies with fixed sizes."""
    multiple: int = 1
    """Only multiples of this are usable."""

    @property
    def is_rigid(self) -> bool:
        """Whether there is only one size."""
        return self.least == self.most


def make_request(job: Job, *, least: int | None = None, most: int | None = None) -> ResourceRequest:
    """Resource request of a job; explicit bounds override the job's own.

    A job that names its devices or its whole layout is rigid, unless bounds are given.
    """
    from yunlu.planning.conflicts import find_conflicts  # noqa: PLC0415 (slow to import)

    multiple = _cut_ways(job)
    fixed = _fixed_devices(job)
    clash = next((clash for clash in find_conflicts(job) if "dp" in clash.axes), None)
    if clash is not None:
        if (least or 1) > 1 or (most or 1) > 1:
            raise JobError(
                f"the job can use one device only: {clash.key}: {clash.why}.",
                hint=f"remove {clash.key}, or leave out --min-devices and --max-devices",
            )
        return ResourceRequest(least=1, most=1, requested=1)
    if least is None and most is None and fixed is not None:
        return _rigid(fixed, multiple)
    low = _round_up(least or multiple, multiple)
    high = most if most is not None else max(job.goal.max_devices or MANY, low)
    high = high // multiple * multiple
    if low > high:
        raise JobError(
            f"no usable number of devices is between {least or multiple} and {most}"
            + (f" and is a multiple of {multiple}" if multiple > 1 else ""),
            hint="lower --min-devices or raise --max-devices",
        )
    requested = min(max(_round_up(fixed or job.layout.said_workers, multiple), low), high)
    if job.communication.method == "asynchronous" and low < 2 <= high:
        low, requested = 2, max(requested, 2)  # a single worker has no peer to exchange with
    return ResourceRequest(least=low, most=high, requested=requested, multiple=multiple)


def _rigid(devices: int, multiple: int) -> ResourceRequest:
    multiple = multiple if devices % multiple == 0 else 1
    return ResourceRequest(least=devices, most=devices, requested=devices, multiple=multiple)


def _fixed_devices(job: Job) -> int | None:
    if job.devices != "auto":
        return job.devices
    return job.layout.said_workers if job.layout.is_whole else None


def _cut_ways(job: Job) -> int:
    """Tensor and pipeline parallel degree: these workers join and leave together."""
    product = 1
    for axis, size in job.layout.sizes.items():
        product *= size if axis != "dp" else 1
    return product


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
