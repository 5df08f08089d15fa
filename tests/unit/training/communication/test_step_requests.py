"""Requests of all workers travel as one sum; the strongest is heard."""

from __future__ import annotations

import pytest

from yunlu.training.communication.communicator import decode_request, encode_request

WORKERS = 100_000
ORDER = ("", "relink", "pause", "finish", "stop")


@pytest.mark.parametrize("strongest", ORDER)
def test_one_request_is_heard_among_many_weaker_ones(strongest: str) -> None:
    for weaker in {*ORDER[: ORDER.index(strongest)], ""} - {"finish"}:  # asked by one worker only
        total = encode_request(strongest) + WORKERS * encode_request(weaker)
        assert decode_request(total) == strongest
        assert int(float(total)) == total  # some are sent as floats
