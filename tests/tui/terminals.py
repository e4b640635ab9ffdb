"""The workbench in a real pseudo-terminal, read by a terminal emulator (pyte)."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

from tests.emulated import text_of

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from klbench.tui.terminal import run_workbench
sys.exit(run_workbench(session=Path(sys.argv[1]), start=None, readonly=True))
"""
DEADLINE_S = 60.0


class Terminal:
    """The workbench on a session, in a terminal of its own."""

    def __init__(
        self,
        session: Path,
        *,
        rows=24,
        columns=80,
        script=SCRIPT,
        flags=None,
        stderr=None,
        **environment: str,
    ) -> None:
        """With `flags` it is `klbench FLAGS open SESSION`, else `script`; `stderr` is a file instead."""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        outer = {name: text for name, text in os.environ.items() if name not in ("TMUX", "STY", "COLORTERM")}
        outer |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **environment}
        command = [sys.executable, "-c", script, str(session)]
        if flags is not None:
            command = [sys.executable, "-m", "klbench", *flags, "open", str(session)]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave if stderr is None else stderr,
            env=outer,
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def text(self) -> str:
        return text_of(self.screen)

    def read(self, wait_s: float) -> bool:
        """Take what was written within `wait_s`; False when there was nothing."""
        ready, _, _ = select.select([self.master], [], [], wait_s)
        if not ready:
            return False
        try:
            self.take(os.read(self.master, 65536))
        except OSError:
            return False
        return True

    def take(self, data: bytes) -> None:
        """Show what was written."""
        self.raw += data
        self._stream.feed(data)

    def until(self, wanted) -> None:
        """Read until `wanted(self)`; fails at the deadline with what was seen."""
        deadline = time.monotonic() + DEADLINE_S
        while not wanted(self):
            assert time.monotonic() < deadline, f"not seen in time:\n{self.text}"
            self.read(0.1)

    def settle(self) -> None:
        """Read until nothing comes any more."""
        while self.read(0.5):
            pass

    def press(self, keys: bytes) -> None:
        """Type at once, as somebody who knows what is about to be shown does."""
        os.write(self.master, keys)

    def ended(self) -> int:
        """The exit code, with everything that was written until then."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read(0.1)
        self.settle()
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: no alternate screen, cursor shown, mouse off, lines cooked."""
        left = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
        cursor = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        mouse = self.raw.rfind(b"\x1b[?1000l") > self.raw.rfind(b"\x1b[?1000h")
        return left and cursor and mouse and termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for handle in (self.master, self._slave):
            with contextlib.suppress(OSError):
                os.close(handle)
