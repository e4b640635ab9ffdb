"""What a person sees of a terminal emulator's screen (pyte)."""

import pyte


def text_of(screen: pyte.Screen) -> str:
    """Its lines without the spaces behind them. pyte's own `display` fails while half of a wide character is
    written over, which a reader that takes bytes as they come can see."""
    columns = range(screen.columns)
    lines = ("".join(screen.buffer[row][column].data for column in columns) for row in range(screen.lines))
    return "\n".join(line.rstrip() for line in lines)
