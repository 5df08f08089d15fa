"""Every codec behind the door keeps the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from yunlu.core.errors import JobError
from yunlu.core.imports import CODECS, known_names
from yunlu.testing.codecs import CodecContract
from yunlu.training.communication.codecs.codec import IdentityCodec, make_codec

if TYPE_CHECKING:
    from torch import Tensor

    from yunlu.training.communication.codecs.codec import Codec


class BuiltIn(CodecContract):
    """A codec of the package, found by its name."""

    codec: ClassVar[str]

    def make_codec(self) -> Codec:
        return make_codec(self.codec, block=64, share=0.1)


class TestNone(BuiltIn):
    codec = "none"


class TestFp16(BuiltIn):
    codec = "fp16"


class TestBf16(BuiltIn):
    codec = "bf16"


class TestInt8(BuiltIn):
    codec = "int8"


class TestInt4(BuiltIn):
    codec = "int4"


class TestOneBit(BuiltIn):
    codec = "onebit"


class TestTopK(BuiltIn):
    codec = "topk"


class TestRandomK(BuiltIn):
    codec = "randomk"


def test_no_codec_of_the_package_is_without_its_contract() -> None:
    assert {kind.codec for kind in BuiltIn.__subclasses__()} == set(known_names(CODECS))


class Hiding(IdentityCodec):
    """Hides what is not finite."""

    def encode(self, values: Tensor, out: Tensor, *, seed: int) -> None:
        super().encode(values.nan_to_num(0.0, 0.0, 0.0), out, seed=seed)


class Overwriting(IdentityCodec):
    """Forgets to add."""

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        super().decode(data, out)


class Shrinking(IdentityCodec):
    """Loses the same values for ever."""

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        decoded = torch.zeros_like(out)
        super().decode(data, decoded)
        decoded[::2] = 0
        if add:
            out.add_(decoded)
        else:
            out.copy_(decoded)


@pytest.mark.parametrize(
    ("flawed", "caught_by"),
    [
        (Hiding, "test_values_that_are_not_finite_are_not_hidden"),
        (Overwriting, "test_decoding_adds_what_it_would_have_written"),
        (Shrinking, "test_error_feedback_delivers_everything_in_the_end"),
    ],
)
def test_the_contract_catches_the_flaw(flawed: Any, caught_by: str) -> None:
    contract = type("Flawed", (CodecContract,), {"make_codec": lambda _: flawed()})()
    with pytest.raises(AssertionError):
        getattr(contract, caught_by)()


def test_an_unknown_codec_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(JobError, match="There is no codec 'int3'") as caught:
        make_codec("int3")
    assert "did you mean 'int" in str(caught.value)
    with pytest.raises(JobError, match="is not a codec"):
        make_codec("yunlu.spec.job:SplitSpec")
