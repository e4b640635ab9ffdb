"""The rules of the workbench, each parsed once.

Textual parses all rules when it begins, again when it has its theme, and again when a widget brings rules of
its own after that: half of them three times before there is a picture.
"""

from __future__ import annotations

from textual.cache import LRUCache
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

_MOST_SOURCES = 1024
"""One for each kind of widget; the fewer that Textual keeps are not found again once there are more."""


class OneParse(Stylesheet):
    """A stylesheet that keeps what it has parsed until the colours change."""

    def __init__(self, *, variables: dict[str, str]) -> None:
        super().__init__(variables=variables)
        self._parse_cache: LRUCache[tuple[object, ...], list[RuleSet]] = LRUCache(_MOST_SOURCES)

    def set_variables(self, variables: dict[str, str]) -> None:
        if variables != self._variables:
            super().set_variables(variables)

    def reparse(self) -> None:
        """Parse what is new. Textual does all of it on a fresh sheet, as rules under work may have errors."""
        self.parse()
