"""Every sampler behind the door keeps the contract."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from yunlu.core.errors import JobError
from yunlu.core.imports import SAMPLERS, call_with, known_names, load_registered
from yunlu.spec.search import SearchSpec
from yunlu.testing.samplers import SMALL, WIDE, SamplerContract
from yunlu.tuning.methods.factory import make_method
from yunlu.tuning.methods.samplers import RandomSampler
from yunlu.tuning.values import Dimension, Method, StartTrial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.tuning.methods.samplers import Sampler, SettingDraws
    from yunlu.tuning.values import Params, StudySnapshot

SEARCH = SearchSpec.model_validate({"space": {"train.batch": [8, 16]}})


class ByChoice:
    """The settings that a method starts, as a sampler."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        action = self._method.choose(snapshot)
        return action.params if isinstance(action, StartTrial) else None


class BuiltIn(SamplerContract):
    """A sampler of the package, found by its name."""

    sampler: ClassVar[str]

    def make_sampler(self, draws: SettingDraws, *, seed: int) -> Sampler:
        factory = load_registered(SAMPLERS, self.sampler, kind="sampler")
        made = call_with(factory, draws=draws, seed=seed, search=SEARCH, objectives=1, past=())
        return ByChoice(made) if isinstance(made, Method) else made


class TestGrid(BuiltIn):
    sampler = "grid"
    wide: ClassVar[Sequence[Dimension]] = (
        Dimension(name="train.optimizer.lr", choices=(1e-4, 1e-3, 1e-2, 1e-1)),
        *WIDE[1:],
    )


class TestRandom(BuiltIn):
    sampler = "random"


class TestSobol(BuiltIn):
    sampler = "sobol"


class TestCmaEs(BuiltIn):
    sampler = "cmaes"


class TestTpe(BuiltIn):
    sampler = "tpe"


@pytest.mark.slow
class TestGp(BuiltIn):
    sampler = "gp"


class TestNsga2(BuiltIn):
    sampler = "nsga2"


class TestFrontier(BuiltIn):
    sampler = "frontier"


def test_no_sampler_of_the_package_is_without_its_contract() -> None:
    assert {kind.sampler for kind in BuiltIn.__subclasses__()} == set(known_names(SAMPLERS))


class Restless(RandomSampler):
    """Does not keep to its seed."""

    def __init__(self, draws: SettingDraws, *, seed: int) -> None:
        super().__init__(draws, seed=random.randrange(1 << 30))


class Repeating(RandomSampler):
    """Never ends."""

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        return self._draws.draw(len(snapshot.trials), set())


@pytest.mark.parametrize(
    ("flawed", "caught_by"),
    [
        (Restless, "test_a_killed_study_goes_on_as_it_would_have"),
        (Repeating, "test_a_small_space_is_tried_once_and_then_ends"),
    ],
)
def test_the_contract_catches_the_flaw(flawed: Any, caught_by: str) -> None:
    made = {"make_sampler": lambda _, draws, *, seed: flawed(draws, seed=seed)}
    contract = type("Flawed", (SamplerContract,), made)()
    with pytest.raises(AssertionError):
        getattr(contract, caught_by)()


def _search(method: str) -> SearchSpec:
    return SearchSpec.model_validate({"space": {"train.batch": [1, 2, 3]}, "method": method})


def test_an_unknown_sampler_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(JobError, match="There is no sampler 'tpee'") as caught:
        make_method(_search("tpee"), SMALL, seed=0)
    assert "did you mean 'tpe'?" in str(caught.value)


class Blind:
    def __init__(self, draws: SettingDraws) -> None:
        self.draws = draws

    def suggest(self, snapshot: StudySnapshot) -> Params | None:
        return self.draws.draw(0, set())


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (f"{__name__}:Blind", {"objectives": 2}, "has one objective"),
        (f"{__name__}:Blind", {"past": [object()]}, "does not learn from earlier trials"),
        ("yunlu.spec.search:StopSpec", {}, "is not a sampler"),
    ],
)
def test_a_sampler_of_elsewhere_is_refused_what_it_does_not_take(
    method: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        make_method(_search(method), SMALL, seed=0, **options)
