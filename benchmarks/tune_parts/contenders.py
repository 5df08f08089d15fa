"""Who takes part, whether it is installed, and which version of it was measured."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yunlu.tuning.values import Dimension, Method

_PROTOCOL = ("yunlu.lab.tuning_replay", "benchmarks.tune_parts.evidence")
"""What every figure depends on."""
_OURS = ("benchmarks.tune_parts.", "yunlu.tuning.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of searching."""

    name: str
    label: str
    module: str
    maker: str
    """In that module: called with dimensions, rungs and seed."""
    package: str = "yunlu"
    needs: tuple[str, ...] = ()
    is_default: bool = True

    @property
    def is_installed(self) -> bool:
        """Whether all that it needs is there."""
        return all(find_spec(each) is not None for each in (self.package, *self.needs))

    def make(self, dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> Method:
        """A fresh one."""
        module: Any = import_module(self.module)
        return getattr(module, self.maker)(dimensions, rungs, seed)

    def find_version(self) -> str:
        """The package's version, and a digest of the code by which a figure came about."""
        sources = _gather_sources([self.module, *_PROTOCOL])
        digest = hashlib.sha256("".join(sources[name] for name in sorted(sources)).encode())
        return f"{metadata.version(self.package)} {digest.hexdigest()[:8]}"


def _gather_sources(modules: list[str]) -> dict[str, str]:
    """These and what they import of ours: what they do; comments and layout do not count."""
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        spec = find_spec(name) if name.startswith(_OURS) else None
        if name in found or spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        found[name] = ast.dump(tree)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        waiting += [node.module for node in imports if node.module]
    return found


_OPTUNA = "benchmarks.tune_parts.optuna_peers"

CONTENDERS = {
    each.name: each
    for each in (
        Contender(
            name="random", label="random", module="benchmarks.tune_parts.random_search",
            maker="make_random",
        ),
        Contender(
            name="tpe", label="Optuna TPE", module=_OPTUNA, maker="make_tpe", package="optuna"
        ),
        Contender(
            name="hyperband", label="Optuna TPE + Hyperband", module=_OPTUNA,
            maker="make_hyperband", package="optuna",
        ),
        Contender(
            name="asha", label="Ray Tune ASHA", module="benchmarks.tune_parts.ray_peers",
            maker="RayAsha", package="ray", needs=("pandas", "pyarrow"),
        ),
        Contender(
            name="yunlu", label="Yunlu", module="benchmarks.tune_parts.own_search",
            maker="make_yunlu", needs=("scipy",),
        ),
        Contender(
            name="halving", label="Optuna TPE + halving", module=_OPTUNA, maker="make_halving",
            package="optuna", is_default=False,
        ),
        Contender(
            name="gp", label="Optuna GP", module=_OPTUNA, maker="make_gp", package="optuna",
            needs=("torch",), is_default=False,
        ),
    )
}  # fmt: skip
