"""Loaded by every Python of the text workload (it is on ``PYTHONPATH``): puts marks into BERT.

The text job of one contender trains in a process that the contender itself starts, from a directory
that only names a class of ``transformers``. The class is therefore marked where it is defined, when
it is imported, in the same way for all.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

_MODULE = "transformers.models.bert.modeling_bert"
_CLASS = "BertForSequenceClassification"


def _mark(kind: Any, path: Path) -> None:
    from benchmarks.trainers_parts.marks import Marks  # noqa: PLC0415 (only in a marked process)

    marks, inner = Marks(), kind.forward

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return inner(self, *args, **kwargs)
        marks.add()
        outputs = inner(self, *args, **kwargs)
        if getattr(outputs, "loss", None) is not None:
            marks.see(outputs.loss)
        return outputs

    kind.forward = forward
    atexit.register(marks.save, path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _mark(getattr(module, _CLASS), Path(os.environ["YUNLU_BENCH_MARKS"]))  # noqa: TID251

        loader.exec_module = exec_module
        return spec


if "YUNLU_BENCH_MARKS" in os.environ:  # noqa: TID251 (a script, not the package)
    sys.meta_path.insert(0, _Finder())
