"""Two themes, dark and light, on a blue and orange scale that the colour-blind tell apart.

Colour only repeats what a glyph or a word says.
"""

from __future__ import annotations

from textual.theme import Theme

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
