"""Where a run listens: on one address, never on all."""

from __future__ import annotations

import pytest

from yunlu.core.errors import YunluError
from yunlu.core.secure_link import bind_address, is_loopback, routed_address


def test_a_run_listens_on_its_own_machine_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YUNLU_BIND", raising=False)
    assert bind_address() == "127.0.0.1"
    monkeypatch.setenv("YUNLU_BIND", "10.1.2.3")
    assert bind_address() == "10.1.2.3"
    monkeypatch.setenv("YUNLU_BIND", "auto")
    assert bind_address() == routed_address() != "0.0.0.0"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "[::]"])
def test_no_run_listens_on_every_network(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_BIND", address)
    with pytest.raises(YunluError, match="one address"):
        bind_address()


def test_loopback_addresses_are_known() -> None:
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")
