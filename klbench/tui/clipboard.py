"""Copying out of a terminal, which may be at the far end of tmux, screen and SSH; the way is said, and a file
is always left.

    inside tmux      tmux load-buffer -w -: its buffer, and the terminal's clipboard through tmux
    inside screen    OSC 52 in screen's pass-through
    otherwise        OSC 52, which the terminal may refuse without a word
    always           clipboard.txt in the session's folder
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from klbench.core.text import size
from klbench.session.folder import write_atomically

MOST_OSC52_BYTES = 74_994
"""xterm takes 100,000 bytes of base64; larger texts would be cut without a word."""
_SCREEN_STRING_BYTES = 700
"""GNU screen takes 768 bytes in one string."""
_TMUX_S = 3.0


def copy(text: str, folder: Path, write: Callable[[str], object], environment: Mapping[str, str]) -> str:
    """Copies `text` and returns what was done, in words. `write` sends bytes to the terminal."""
    content = text.encode("utf-8", "replace")
    file = folder / "clipboard.txt"
    try:
        write_atomically(file, content)
        kept = f"kept in {file}"
    except OSError as error:
        kept = f"no file: {error.strerror or error}"
    way = _by_tmux(content) if environment.get("TMUX") else None
    if way is None:
        way = _by_terminal(content, write, inside_screen=bool(environment.get("STY")))
    return f"{size(len(content))} copied {way}\n{kept}"


def _by_tmux(content: bytes) -> str | None:
    """Through tmux, which needs no setting of its own; None where there is no tmux to ask."""
    for arguments, way in (
        (["load-buffer", "-w", "-"], "by tmux, to its buffer (prefix ] pastes) and the terminal's clipboard"),
        (["load-buffer", "-"], "to tmux's buffer (prefix ] pastes)"),
    ):
        try:
            done = subprocess.run(
                ["tmux", *arguments], input=content, capture_output=True, timeout=_TMUX_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return way
    return None


def _by_terminal(content: bytes, write: Callable[[str], object], *, inside_screen: bool) -> str:
    if len(content) > MOST_OSC52_BYTES:
        return f"to the file only: terminals take {size(MOST_OSC52_BYTES)} at most"
    for part in osc52(content, inside_screen=inside_screen):
        write(part)
    through = "through screen " if inside_screen else ""
    return f"{through}to the terminal's clipboard (OSC 52, where the terminal allows it)"


def osc52(content: bytes, *, inside_screen: bool) -> list[str]:
    """The strings that hand `content` to the terminal's clipboard."""
    whole = f"\x1b]52;c;{base64.b64encode(content).decode('ascii')}\x07"
    if not inside_screen:
        return [whole]
    parts = [whole[at : at + _SCREEN_STRING_BYTES] for at in range(0, len(whole), _SCREEN_STRING_BYTES)]
    return [f"\x1bP{part}\x1b\\" for part in parts]


def this_environment() -> Mapping[str, str]:
    return os.environ
