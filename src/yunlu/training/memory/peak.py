"""Peak memory: of this process, and of the tensors of a computation."""

from __future__ import annotations

import re
import resource
import sys
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self


_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Peak resident bytes since the process began."""
    with suppress(OSError):
        match = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        if match:
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes of tensors created by ``run``.

    Existing tensors do not count; neither does memory that a kernel allocates and frees
    inside itself.
    """
    with LiveBytes() as live:
        run()
    return live.peak


class _Held(NamedTuple):
    nbytes: int
    part: str


class LiveBytes(TorchDispatchMode):
    """Counts tensors created inside it while they live; slows each operator a little.

    Storages count once, and belong to the ``phase`` in which they were created until ``assign`` says
    what they hold. Of a distributed tensor the local one counts: the operations on it come here, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.now = 0
        self.peak = 0
        self.peak_phase = ""
        self.parts: dict[str, int] = {}
        """Bytes at the peak, by what they hold."""
        self._held: dict[int, _Held] = {}
        self._by_part: Counter[str] = Counter()

    def forget_peak(self) -> None:
        """Look for the peak from now on."""
        self.peak, self.parts = 0, {}

    def assign(self, part: str, tensors: Iterable[Any]) -> None:
        """Say what these tensors hold."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (key := _key(tensor)) in self._held:
                self._relabel(key, part)

    def __enter__(self) -> Self:
        self._plain_resize: Any = torch.UntypedStorage.resize_

        # FSDP2 frees gathered weights by it, which no operator shows.
        def resize(storage: Any, size: int) -> Any:
            result = self._plain_resize(storage, size)
            if storage._cdata in self._held:
                self._relabel(storage._cdata, "gathered weights")
                self._change(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _is_distributed(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(value, Tensor) and _device_of(value).type != "meta":
                key = _key(value)
                # Views and in-place results own no memory.
                if key in self._held or not _shares(key, args, kwargs):
                    self._hold(key, value.untyped_storage())
        return result

    def _hold(self, key: int, storage: Any) -> None:
        if key not in self._held:
            self._held[key] = _Held(0, self.phase)
            weakref.finalize(storage, self._drop, key).atexit = False
        self._change(key, storage.nbytes())

    def _change(self, key: int, nbytes: int) -> None:
        before, part = self._held[key]
        if nbytes == before:
            return
        self._held[key] = _Held(nbytes, part)
        self.now += nbytes - before
        self._by_part[part] += nbytes - before
        if self.now > self.peak:
            self.peak, self.peak_phase = self.now, self.phase
            self.parts = {name: count for name, count in self._by_part.items() if count > 0}

    def _relabel(self, key: int, part: str) -> None:
        nbytes, before = self._held[key]
        self._by_part[before] -= nbytes
        self._by_part[part] += nbytes
        self._held[key] = _Held(nbytes, part)

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.now -= held.nbytes
            self._by_part[held.part] -= held.nbytes


def _device_of(tensor: Tensor) -> torch.device:
    # Asking a fake tensor for its device is an operator of its own.
    return getattr(tensor, "fake_device", None) or tensor.device


def _is_distributed(types: Any) -> bool:
    """Whether torch works on local tensors inside the operator."""
    return any(kind.__module__ == "torch.distributed.tensor" for kind in types)


def _shares(key: int, args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(value, Tensor) and not _is_distributed((type(value),)) and _key(value) == key
        for value in tree_iter((args, kwargs))
    )


def _key(value: Any) -> int:
    # Two views of one storage may be two Python objects.
    local = value._local_tensor if _is_distributed((type(value),)) else value
    return local.untyped_storage()._cdata
