"""A plugin for pytest: the training tests, with an accelerator where they have the CPU.

A test *trains* where a backward pass runs in any of its processes; the device's package notes on which
device (PRETEND_BACKWARD_LOG). A race that the clocks find fails the test in which it happened.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.pretend.build import ROOT
from tests.pretend.suite import GIVEN_ON_HOST, KIND, MADE_ON_DEVICE, TASKS, reason_against
from yunlu.training.device import move_model

MAKERS = (str(ROOT / "tests"), str(ROOT / "src" / "yunlu" / "training" / "models"))

BACKWARDS, RACES = Path(os.environ["PRETEND_BACKWARD_LOG"]), Path(os.environ["PRETEND_RACE_LOG"])
REPORT = Path(os.environ["PRETEND_REPORT"])
_TASKS = "yunlu.training.tasks."
outcomes: dict[str, dict[str, object]] = defaultdict(dict)


def lines_of(file: Path) -> list[str]:
    """What all processes wrote so far."""
    return file.read_text().splitlines() if file.exists() else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what says nothing about an accelerator."""
    for item in items:
        if reason := reason_against(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


def making_on_device(node: pytest.Item | pytest.Collector) -> AbstractContextManager[object]:
    """On the device lies what is made within, if that is for this test."""
    return _OnDevice() if node.nodeid.startswith(MADE_ON_DEVICE) else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[object]:
    """Tests may keep tensors in constants of their modules."""
    with making_on_device(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Note on which devices the processes of this test ran backward passes."""
    import pretend_accelerator

    pretend_accelerator.forget_backwards()
    before, started = len(lines_of(BACKWARDS)), os.times()
    try:
        with making_on_device(item):
            return (yield)
    finally:
        ended = os.times()
        outcomes[item.nodeid]["trained_on"] = sorted(set(lines_of(BACKWARDS)[before:]))
        outcomes[item.nodeid]["cpu_s"] = round(sum(ended[:4]) - sum(started[:4]), 2)


@pytest.fixture(autouse=True)
def tasks_on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of tasks train them by hand: what a task builds and collates is moved for them."""
    name = request.node.nodeid
    if not name.startswith(TASKS) or any(f"::test_{test}" in name for test in GIVEN_ON_HOST):
        return
    modules = [sys.modules[name] for name in sys.modules if name.startswith(_TASKS)]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    for kind in kinds:
        for name in {"build", "collate"} & vars(kind).keys():
            monkeypatch.setattr(kind, name, _moved(vars(kind)[name]))


def _moved(function: Any) -> Any:
    @functools.wraps(function)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        made, device = function(*args, **kwargs), torch.device(KIND)
        return move_model(made, device) if isinstance(made, nn.Module) else made.to(device)

    return on_device


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail where there was a race, even if nobody else cared."""
    before = len(lines_of(RACES))
    yield
    races = lines_of(RACES)[before:]
    assert not races, "\n".join(races)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's three parts."""
    order = ("passed", "skipped", "failed")
    outcome = outcomes[report.nodeid]
    worst = max(str(outcome.get("outcome", "passed")), report.outcome, key=order.index)
    outcome["outcome"] = worst
    if report.outcome != "passed":
        outcome["why"] = str(report.longrepr)[-3000:]


def pytest_sessionfinish() -> None:
    """Leave the outcomes to whoever started this."""
    REPORT.write_text(json.dumps(outcomes, indent=1))


class _OnDevice(TorchFunctionMode):
    """What a test makes lies on the device; what the product makes lies where the product puts it.

    Made on the CPU and moved: random numbers are those that the CPU would have.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Move what a constructor returns."""
        if getattr(func, "__name__", "") in ("uniform_", "normal_"):
            return _draw(func, *args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        is_new = func in _device_constructors() and (kwargs or {}).get("device") is None
        if is_new and made.device.type == "cpu" and _is_asked_by_a_test():
            return made.detach().to(KIND).requires_grad_(made.requires_grad)
        return made


def _draw(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill a tensor, or ``torch.nn.init``'s, with the numbers that the CPU would draw."""
    own = {"tensor": kwargs["tensor"]} if "tensor" in kwargs else {}
    tensor = own.get("tensor", args[0] if args else None)
    if tensor.device.type != KIND or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    drawn = tensor.detach().cpu()
    func(*(() if own else (drawn, *args[1:])), **(kwargs | dict.fromkeys(own, drawn)))
    with torch.no_grad():
        return tensor.copy_(drawn)


def _is_asked_by_a_test() -> bool:
    """Whether the nearest caller that is no package of others is a test, or a model that one builds."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and file != __file__:
            return file.startswith(MAKERS)
        frame = frame.f_back
    return False
