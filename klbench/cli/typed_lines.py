"""Lines of standard input for an event loop: of a terminal or a pipe as they are typed, of a file at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def typed_lines() -> Iterator[asyncio.Queue[str | None]]:
    """Lines of standard input as they come, None at its end."""
    loop, lines, part = asyncio.get_running_loop(), asyncio.Queue[str | None](), b""

    def read() -> None:
        nonlocal part
        data = os.read(handle, 65536)
        *whole, part = (part + data).split(b"\n")
        for line in [*whole, *([part] if not data and part else [])]:
            lines.put_nowait(line.decode("utf-8", "replace"))
        if not data:
            loop.remove_reader(handle)
            lines.put_nowait(None)

    handle = sys.stdin.fileno()
    try:
        loop.add_reader(handle, read)
    except PermissionError:  # a file, which is there at once
        for line in [*sys.stdin, None]:
            lines.put_nowait(line)
    try:
        yield lines
    finally:
        loop.remove_reader(handle)
