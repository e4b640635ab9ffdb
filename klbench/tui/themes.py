"""Two themes, dark and light, on a blue and orange scale that the colour-blind tell apart; each in full
colours and in the terminal's own 16.

Colour only repeats what a glyph or a word says.
"""

from __future__ import annotations

from typing import Any

from textual.theme import BUILTIN_THEMES, Theme

DARK = Theme(
    name="klbench-dark",
    primary="#5fafff",
    secondary="#87afd7",
    accent="#5fd7ff",
    warning="#ffaf5f",
    error="#ff8787",
    success="#87afff",
    foreground="#d8dee9",
    background="#10151c",
    surface="#10151c",
    panel="#1d2733",
    dark=True,
    variables={
        "border": "#5fafff",
        "border-blurred": "#46566a",
        "block-cursor-background": "#2f5f8f",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-blurred-background": "#26323f",
        "block-cursor-blurred-foreground": "#d8dee9",
        "text-muted": "#93a1b3",
    },
)
LIGHT = Theme(
    name="klbench-light",
    primary="#005f9f",
    secondary="#3f6f9f",
    accent="#005f87",
    warning="#9f4f00",
    error="#a8001c",
    success="#00508f",
    foreground="#1c2430",
    background="#fafbfc",
    surface="#fafbfc",
    panel="#e4e9ef",
    dark=False,
    variables={
        "border": "#005f9f",
        "border-blurred": "#a9b5c2",
        "block-cursor-background": "#bcd8f2",
        "block-cursor-foreground": "#0b1520",
        "block-cursor-blurred-background": "#e0e7ee",
        "block-cursor-blurred-foreground": "#1c2430",
        "text-muted": "#566476",
    },
)
_SIXTEEN: dict[str, Any] = {
    "foreground": "ansi_default",
    "background": "ansi_default",
    "surface": "ansi_default",
    "panel": "ansi_default",
    "boost": "ansi_default",
}
_SIXTEEN_VARIABLES = {
    "input-cursor-background": "ansi_default",
    "input-cursor-foreground": "ansi_default",
    "input-selection-background": "ansi_blue",
    "input-selection-foreground": "ansi_bright_white",
    "screen-selection-background": "ansi_blue",
    "screen-selection-foreground": "ansi_bright_white",
    "scrollbar-corner-color": "ansi_default",
    "scrollbar-background": "ansi_default",
    "scrollbar-background-hover": "ansi_default",
    "scrollbar-background-active": "ansi_default",
    "block-cursor-background": "ansi_blue",
    "block-cursor-foreground": "ansi_bright_white",
}
DARK_16 = Theme(
    name="klbench-dark-16",
    ansi=True,
    primary="ansi_bright_blue",
    secondary="ansi_cyan",
    accent="ansi_bright_cyan",
    warning="ansi_bright_yellow",
    error="ansi_bright_red",
    success="ansi_bright_blue",
    dark=True,
    variables={
        **BUILTIN_THEMES["ansi-dark"].variables,
        **_SIXTEEN_VARIABLES,
        "border": "ansi_bright_blue",
        "border-blurred": "ansi_white",
        "block-cursor-blurred-background": "ansi_bright_black",
        "block-cursor-blurred-foreground": "ansi_bright_white",
        "text-muted": "ansi_white",
        "scrollbar": "ansi_bright_blue",
        "scrollbar-hover": "ansi_bright_blue",
        "scrollbar-active": "ansi_bright_blue",
    },
    **_SIXTEEN,
)
LIGHT_16 = Theme(
    name="klbench-light-16",
    ansi=True,
    primary="ansi_blue",
    secondary="ansi_blue",
    accent="ansi_blue",
    warning="ansi_red",
    error="ansi_magenta",
    success="ansi_blue",
    dark=False,
    variables={
        **BUILTIN_THEMES["ansi-light"].variables,
        **_SIXTEEN_VARIABLES,
        "border": "ansi_blue",
        "border-blurred": "ansi_bright_black",
        "block-cursor-blurred-background": "ansi_white",
        "block-cursor-blurred-foreground": "ansi_black",
        "text-muted": "ansi_bright_black",
        "scrollbar": "ansi_blue",
        "scrollbar-hover": "ansi_blue",
        "scrollbar-active": "ansi_blue",
    },
    **_SIXTEEN,
)
ALL = (DARK, LIGHT, DARK_16, LIGHT_16)


def name_of(theme: str, *, few_colours: bool) -> str:
    """The name of the dark or light theme, in full colours or few."""
    full, few = (LIGHT, LIGHT_16) if theme == "light" else (DARK, DARK_16)
    return (few if few_colours else full).name
