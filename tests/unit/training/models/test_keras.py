from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from yunlu.core.errors import ModelError
from yunlu.core.settings import use_keras_on_torch
from yunlu.spec.job import ModelSpec
from yunlu.training.models.build import build_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

use_keras_on_torch()
keras: Any = pytest.importorskip("keras")
# Keras turns its variables into arrays by a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def save(path: Path, *layers: Any) -> Path:
    keras.Sequential([keras.Input((4,)), *layers]).save(path)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    layers = keras.layers
    return save(
        tmp_path / "net.keras",
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(3),
    )


def load(name: str | Path, **args: Any) -> nn.Module:
    return build_model(ModelSpec(name=str(name), args=args), builtins={}, sizes={})


def test_a_keras_file_becomes_a_module_that_learns(saved: Path) -> None:
    model = load(saved)
    inputs, targets = torch.randn(32, 4), torch.randint(0, 3, (32,))
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=0.05)
    losses: list[float] = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_dropout_and_batch_norm_follow_train_and_eval(saved: Path) -> None:
    model, inputs = load(saved), torch.randn(16, 4)
    moving = next(value for name, value in model.state_dict().items() if "moving_mean" in name)
    model.eval()
    before = moving.clone()
    torch.testing.assert_close(model(inputs), model(inputs))
    torch.testing.assert_close(moving, before)
    model.train()
    assert not torch.allclose(model(inputs), model(inputs))
    assert not torch.allclose(moving, before)


def test_weights_have_the_same_names_however_often_the_file_was_loaded(saved: Path) -> None:
    first, second, inputs = load(saved).eval(), load(saved).eval(), torch.randn(5, 4)
    with torch.no_grad():
        next(first.parameters()).add_(1)
    assert not torch.allclose(first(inputs), second(inputs))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(inputs), second(inputs))


def test_code_inside_a_lambda_layer_never_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    source = f"lambda x: (open({str(ran)!r}, 'w').close(), x)[1]"
    path = save(tmp_path / "l.keras", keras.layers.Lambda(eval(source), output_shape=(4,)))
    ran.unlink(missing_ok=True)
    with pytest.raises(ModelError, match="Lambda layer"):
        load(path)
    assert not ran.exists()


@pytest.mark.parametrize("content", [b"not a zip", b""])
def test_a_torn_file_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "torn.keras"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"not a valid \.keras file"):
        load(path)


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(path)


def test_a_missing_file_and_needless_arguments_are_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match="no Keras file"):
        load("nowhere.keras")
    with pytest.raises(ModelError, match="takes no arguments"):
        load(saved, width=3)


OWN = """
import keras
def make(classes):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(classes)])
def unbuilt():
    return keras.Sequential([keras.layers.Dense(2)])
"""


def test_a_users_function_may_return_a_keras_model(tmp_path: Path) -> None:
    file = tmp_path / "own_keras_models.py"
    file.write_text(OWN)
    spec = ModelSpec(name=f"{file}:make")
    model = build_model(spec, builtins={}, sizes={"classes": 6, "vocabulary": 3})
    assert model(torch.randn(2, 4)).shape == (2, 6)
    with pytest.raises(ModelError, match="no weights yet"):
        load(f"{file}:unbuilt")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("ratio=100, ratio_from=1MiB", "above 100 to 1"),
        ("memory=1MiB", "in memory"),
        ("columns=1", "has 2 members"),
    ],
)
def test_an_archive_that_unpacks_too_far_is_refused_before_keras_sees_it(
    settings: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", bytes(4 << 20))
    monkeypatch.setenv("YUNLU_LIMITS", settings)
    with pytest.raises(ModelError, match=words):
        load(path)
