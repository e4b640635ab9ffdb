"""The server's log as lines that are safe to show, read from its end on as it grows.

A log may be large, may be truncated or replaced (a relaunch), and holds whatever the server prints.
"""

from __future__ import annotations

import re
from pathlib import Path

from klbench.core.text import visible
from klbench.storage import open_regular

FIRST_BYTES = 2 * 1024 * 1024
"""How much of an existing log is read when it is opened: its end is what matters."""
STEP_BYTES = 1024 * 1024
MAX_LINE_CHARACTERS = 4000

_TROUBLE = re.compile(
    r"(?i:\b(?:error|exception|traceback|critical|fatal|out of memory|killed)\b)|[a-z](?:Error|Exception)\b"
)
# Colours that the server writes for a terminal say nothing here and would drown the words.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def speaks_of_trouble(line: str) -> bool:
    """Whether a line of the log tells of an error."""
    return _TROUBLE.search(line) is not None


def clean_line(line: str, *, most: int | None = MAX_LINE_CHARACTERS) -> str:
    """One line of the log as it may be drawn: colours dropped, all else made visible, tabs as spaces; cut
    behind `most` characters, or nowhere."""
    if most is not None and len(line) > most:
        line = line[:most] + "…"
    # A progress bar rewrites its line: what it last said is what a terminal would show.
    line = _COLOUR.sub("", line).rstrip("\r").rpartition("\r")[2].replace("\t", "    ")
    return visible(line)


class ServerLog:
    """Reads one log file. `read` gives the lines that were completed since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset: int | None = None
        self._inode = 0
        self._part = b""

    def read(self) -> tuple[list[str], bool]:
        """(new lines, whether the log began anew): at most STEP_BYTES of them, [] when nothing is there."""
        try:
            status = self.path.stat()
            restarted = self._offset is not None and (
                status.st_size < self._offset or status.st_ino != self._inode
            )
            if self._offset is None or restarted:
                self._offset = max(status.st_size - FIRST_BYTES, 0)
                self._part = b""
                cut = self._offset > 0
            else:
                cut = False
            self._inode = status.st_ino
            if status.st_size == self._offset:
                return [], restarted
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = file.read(FIRST_BYTES if cut or self._offset == 0 else STEP_BYTES)
        except OSError:
            return [], False
        self._offset += len(data)
        *whole, part = (self._part + data).split(b"\n")
        self._part = part[-MAX_LINE_CHARACTERS * 4 :]
        lines = [clean_line(line.decode("utf-8", errors="replace")) for line in whole]
        return (lines[1:] if cut else lines), restarted
