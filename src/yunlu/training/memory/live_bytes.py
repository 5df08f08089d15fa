"""Bytes of live tensors, counted at each operator, on any device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes of tensors created by ``run``.

    Existing tensors do not count; neither does memory that a kernel allocates and frees
    inside itself.
    """
    with LiveBytes() as live:
        run()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts tensors created inside it while they live; slows each operator a little."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        argument_storages = {
            _key(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)
        }
        for value in tree_iter(result):
            # Views and in-place results own no memory.
            if isinstance(value, Tensor) and _key(value) not in argument_storages:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata  # two views of one storage may be two Python objects
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _key(value: Any) -> int:
    return value.untyped_storage()._cdata
