"""One facade for everything: the client protocol, the client of this machine, the public calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yunlu.client.protocol import Client


def default_client() -> Client:
    """The client of this machine."""
    from yunlu.client.local import LocalClient  # noqa: PLC0415 (help texts need no client)

    return LocalClient()
