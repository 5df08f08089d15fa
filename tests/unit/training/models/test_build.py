from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from yunlu.core.errors import JobError, ModelError
from yunlu.spec.job import ModelSpec
from yunlu.training.models.build import build_model, check_call, is_hf

if TYPE_CHECKING:
    from pathlib import Path


class Net(nn.Module):
    def __init__(
        self,
        *,
        classes: int,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        deep: bool = False,
    ) -> None:
        super().__init__()
        if dropout >= 1:
            raise ValueError("dropout must be below 1")
        self.head = nn.Linear((hidden or [4])[-1], classes)


def build(name: str = "net", **args: Any) -> nn.Module:
    spec = ModelSpec(name=name, args=args)
    return build_model(spec, builtins={"net": Net}, sizes={"classes": 3})


def test_a_built_in_gets_the_sizes_of_the_data_and_the_users_arguments() -> None:
    model = build(hidden=[8, 6])
    assert isinstance(model, Net)
    assert model.head.weight.shape == (3, 6)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"hiden": [4]}, r"model.args.hiden.*\n.*did you mean 'hidden'"),
        ({"hidden": "4"}, r"model.args.hidden: '4'"),
        ({"hidden": ["a"]}, r"model.args.hidden"),
        ({"dropout": "a"}, r"model.args.dropout: 'a'"),
        ({"dropout": "0.5"}, r"model.args.dropout: '0.5' is not of type float"),
        ({"deep": 1}, r"model.args.deep: 1 is not of type bool"),
        ({"classes": 2}, r"model.args.classes follows from the data"),
        ({"dropout": 2.0}, r"dropout must be below 1"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build(**args)


def test_a_whole_number_passes_for_a_fraction() -> None:
    assert build(dropout=0)


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean 'net'"):
        build("nett")


def test_a_task_without_hugging_face_models_says_so() -> None:
    with pytest.raises(ModelError, match="does not support Hugging Face models"):
        build("hf:gpt2")


OWN = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, classes, width=2):
        super().__init__()
        self.layer = nn.Linear(width, classes)

def make(width):
    return nn.Linear(width, width)

def open_ended(**args):
    return nn.Linear(args["width"], len(args))

def not_a_module():
    return 3

ready = nn.Linear(2, 2)
number = 4
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_models_to_build.py"
    path.write_text(OWN)
    return path


def test_the_users_class_gets_the_sizes_it_names(own: Path) -> None:
    model: Any = build(f"{own}:Mine", width=5)
    assert model.layer.weight.shape == (3, 5)


def test_the_users_arguments_win_over_the_sizes(own: Path) -> None:
    model: Any = build(f"{own}:Mine", classes=9)
    assert model.layer.weight.shape == (9, 2)


def test_a_factory_that_names_no_sizes_gets_none(own: Path) -> None:
    assert build(f"{own}:make", width=4).weight.shape == (4, 4)
    assert build(f"{own}:open_ended", width=4).weight.shape == (1, 4)


def test_a_ready_module_is_taken_as_it_is(own: Path) -> None:
    assert isinstance(build(f"{own}:ready"), nn.Linear)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("Mine", {"widht": 3}, "did you mean 'width'"),
        ("make", {}, "missing 1 required positional argument"),
        ("not_a_module", {}, "gave a int; a torch.nn.Module was expected"),
        ("number", {}, "not a class or function"),
    ],
)
def test_a_users_model_that_cannot_be_built_says_why(
    own: Path, name: str, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        build(f"{own}:{name}", **args)


def test_a_missing_user_class_is_a_job_error(own: Path) -> None:
    with pytest.raises(JobError, match="did you mean 'Mine'"):
        build(f"{own}:Mne")


def test_a_module_that_cannot_take_the_inputs_is_refused_before_training() -> None:
    check_call(nn.Linear(2, 2), ("ids",))
    with pytest.raises(ModelError, match=r"Linear.forward does not take \(ids, mask\)"):
        check_call(nn.Linear(2, 2), ("ids", "mask"))


def test_a_plain_module_is_not_a_hugging_face_model() -> None:
    assert not is_hf(nn.Linear(2, 2))
