"""Words of others, which are shown as they stand in every language: where a figure of the catalog is from."""

from __future__ import annotations

from rich.text import Text


class Verbatim(Text):
    """Text that is not translated, although a part of it may read like one of ours."""

    def copy(self) -> Verbatim:
        """The same words."""
        copied = Verbatim(self.plain, style=self.style, overflow=self.overflow, end=self.end)
        copied.spans = list(self.spans)
        return copied
