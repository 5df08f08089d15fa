from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from yunlu.core.errors import ModelError, TrainingError
from yunlu.training.compiler import (
    compile_model,
    compiler_problem,
    estimate_compile_s,
    set_compiled_call,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
NO_COMPILER = {"cpp.cxx": ("there-is-no-such-compiler",)}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Tagger(nn.Module):
    """One score for each token of a row."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, width)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.score(self.embed(tokens))).squeeze(-1)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the C++ compiler is what takes the time
@pytest.mark.skipif(compiler_problem("inductor") is not None, reason="no C++ compiler")
# torch's own code uses what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_the_same_model_and_compiles_twice_for_many_lengths() -> None:
    plain, model = Tagger(), Tagger()
    names = list(model.state_dict())
    compile_model(model, "inductor", CPU)
    for length in (5, 9, 17, 12, 30):
        tokens = torch.arange(4 * length).view(4, length) % 10
        answers = model(tokens)
        torch.testing.assert_close(answers, plain(tokens))
        answers.square().sum().backward()
        plain(tokens).square().sum().backward()
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, atol=1e-5, rtol=1e-5)
    assert list(model.state_dict()) == names
    # A copy, as the moving average and a loading process make, runs as it was written.
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None
    set_compiled_call(model, None)
    before = counters["stats"]["calls_captured"]
    model(torch.zeros(1, 3, dtype=torch.long))
    assert counters["stats"]["calls_captured"] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_error_of_the_compiler_says_what_to_do() -> None:
    model = Tagger(width=7)
    compile_model(model, "inductor", CPU)
    with (
        inductor.patch({**NO_COMPILER, "force_disable_caches": True}),
        pytest.raises(ModelError, match="cannot be compiled") as caught,
    ):
        model(torch.zeros(2, 3, dtype=torch.long))
    assert caught.value.hint == "Set train.compile: false."


def test_a_machine_without_a_compiler_is_told_before_anything_runs() -> None:
    with inductor.patch(NO_COMPILER):
        problem = compiler_problem("inductor")
        assert problem is not None
        assert "C++ compiler" in problem
        with pytest.raises(TrainingError, match=r"C\+\+ compiler"):
            compile_model(Tagger(), "inductor", CPU)


def test_xla_without_its_package_is_refused() -> None:
    problem = compiler_problem("xla")
    assert problem is not None
    assert "not installed" in problem
    with pytest.raises(TrainingError, match="torch_xla"):
        compile_model(Tagger(), "xla", CPU)


def test_xla_built_for_another_torch_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import would crash the process: only its version is looked at."""
    info = tmp_path / "torch_xla-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    (tmp_path / "torch_xla.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = compiler_problem("xla")
    assert problem is not None
    assert "torch_xla 2.9.0 is built for torch 2.9" in problem
    assert torch.__version__ in problem
    with pytest.raises(TrainingError, match="same version"):
        compile_model(Tagger(), "xla", CPU)


def test_the_estimate_grows_with_the_layers() -> None:
    deep = nn.Sequential(*(Tagger() for _ in range(10)))
    assert estimate_compile_s(deep) > estimate_compile_s(Tagger()) > 0
