"""How the workbench looks and how much it sends: what the settings and the terminal make of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from klbench.tui import ascii, themes


@dataclass(frozen=True, slots=True)
class Look:
    """`slow`: the line is slow; `few_colours`: the terminal has 16 of them, or as many are wanted."""

    theme: str = "dark"
    compact: bool = False
    ascii: bool = False
    slow: bool = False
    few_colours: bool = False
    mouse: bool = True

    @property
    def theme_name(self) -> str:
        """The theme of Textual's that shows it."""
        return themes.name_of(self.theme, few_colours=self.few_colours or self.slow)

    @property
    def step_s(self) -> float:
        """How often at most the screen follows the session."""
        return 0.5 if self.slow else 0.25


def look_of(settings: Mapping[str, object], *, colours: int) -> Look:
    """The look that the settings ask for, in a terminal that has so many colours."""
    slow = bool(settings["workbench.slow_link"])
    return Look(
        theme=str(settings["workbench.theme"]),
        compact=bool(settings["workbench.compact"]),
        ascii=ascii.wanted(settings["workbench.ascii"]),
        slow=slow,
        few_colours=colours <= 16,
        mouse=bool(settings["workbench.mouse"]) and not slow,
    )
