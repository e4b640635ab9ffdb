"""Slow lines: what must be said to Textual before it is imported, and how slow the line is.

Imports nothing of Textual. What the workbench itself does less of on a slow line is in look.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import termios
import time
import tty
from collections.abc import Mapping

SLOW_S = 0.15
"""A round trip that is felt with every key."""
_LIMIT_S = 0.6
_POSITION = re.compile(rb"\x1b\[\d+;\d+R")


def prepare(*, slow: bool) -> None:
    """Set what Textual reads when it is imported; what the user has set stays."""
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    if slow:
        os.environ.setdefault("TEXTUAL_FPS", "10")
        os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
        os.environ.setdefault("TEXTUAL_COLOR_SYSTEM", "standard")


def advice(environment: Mapping[str, str]) -> str:
    """What to do about this line, empty where it is not slow or not known.

    Asked over SSH only. Inside tmux and screen these answer themselves, so nothing is known there.
    """
    if not environment.get("SSH_CONNECTION") or environment.get("TMUX") or environment.get("STY"):
        return ""
    took = round_trip_s(0, 1)
    if took is None or took < SLOW_S:
        return ""
    helps = "klbench --slow-link sends less, ssh -C compresses the rest"
    return f"this line takes {1000 * took:.0f} ms there and back: {helps}"


def round_trip_s(source: int, target: int) -> float | None:
    """Seconds until the terminal says where its cursor is; None where it does not, or keys lie waiting."""
    with contextlib.suppress(OSError, termios.error):
        if select.select([source], [], [], 0)[0]:
            return None
        before = termios.tcgetattr(source)
        try:
            tty.setcbreak(source, termios.TCSANOW)
            began = time.monotonic()
            os.write(target, b"\x1b[6n")
            answer = b""
            while (left := began + _LIMIT_S - time.monotonic()) > 0:
                if not select.select([source], [], [], left)[0]:
                    break
                answer += os.read(source, 64)
                if _POSITION.search(answer):
                    return time.monotonic() - began
        finally:
            termios.tcsetattr(source, termios.TCSANOW, before)
    return None
