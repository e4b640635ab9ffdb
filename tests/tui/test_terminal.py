"""The workbench in a real pseudo-terminal: what pilots cannot see.

A terminal emulator (pyte) reads what is really written; signals are real; the process is real.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest
import recorded

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from klbench.tui.app import run_workbench
sys.exit(run_workbench(session=Path(sys.argv[1]), start=None, readonly=True))
"""
DEADLINE_S = 60.0


class Terminal:
    """The workbench on a session, in a terminal of its own."""

    def __init__(self, session: Path, *, rows=24, columns=80, script=SCRIPT) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(session)],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self, wait_s: float) -> bool:
        """Take what was written within `wait_s`; False when there was nothing."""
        ready, _, _ = select.select([self.master], [], [], wait_s)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def until(self, wanted) -> None:
        """Read until `wanted(self)`; fails at the deadline with what was seen."""
        deadline = time.monotonic() + DEADLINE_S
        while not wanted(self):
            assert time.monotonic() < deadline, f"not seen in time:\n{self.text}"
            self.read(0.1)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended(self) -> int:
        """The exit code, with everything that was written until then."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read(0.1)
        while self.read(0.05):
            pass
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


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def open_terminal(session=None, **options):
        session = session or recorded.finished(tmp_path / "20251129-dense")
        opened.append(Terminal(session, **options))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def drawn(terminal) -> bool:
    return "2 requests" in terminal.text and "q quit" in terminal.text and "▌" in terminal.text


def test_it_starts_draws_and_quits_leaving_the_terminal_as_it_was(terminal):
    it = terminal()
    it.until(drawn)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()
    assert b"klbench open 20251129-dense" in it.raw


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_detaches_and_restores_the_terminal(terminal, number, code):
    it = terminal()
    it.until(drawn)
    os.kill(it.process.pid, number)
    assert it.ended() == code
    assert it.restored()


def test_a_lost_terminal_ends_the_screen_quietly(terminal, tmp_path):
    it = terminal()
    it.until(drawn)
    os.close(it.master)
    os.close(it._slave)
    os.kill(it.process.pid, signal.SIGHUP)
    assert it.process.wait(DEADLINE_S) == 129
    assert not list((tmp_path / "20251129-dense").glob("crash-*"))


def test_hostile_tokens_reach_the_terminal_only_spelled_out(terminal):
    it = terminal(rows=50, columns=160)
    it.until(drawn)
    it.press(b"\r")
    it.until(lambda t: "request" in t.text.splitlines()[0])
    it.press(b"G")
    it.until(lambda t: "row 128 of 128" in t.text)
    it.press(b"\x1b")
    it.until(drawn)
    it.press(b"l")
    it.until(lambda t: "following" in t.text)
    assert b"owned" in it.raw
    assert b"\x1b]0;owned" not in it.raw
    assert "\u202e".encode() not in it.raw
    assert "\u200b".encode() not in it.raw


def test_it_survives_a_storm_of_sizes(terminal):
    it = terminal()
    it.until(drawn)
    for rows, columns in ((10, 30), (70, 250), (24, 80), (16, 60), (40, 120)):
        it.resize(rows, columns)
        os.kill(it.process.pid, signal.SIGWINCH)
        it.read(0.05)
    it.until(lambda t: drawn(t) and t.text.splitlines()[-1].startswith(" enter tokens"))
    it.press(b"q")
    assert it.ended() == 0


def test_an_idle_screen_sends_nothing(terminal):
    it = terminal()
    it.until(drawn)
    while it.read(1.0):
        pass
    assert not it.read(3.0)


def test_a_crash_of_the_screen_restores_the_terminal_and_prints_no_values(terminal, tmp_path):
    script = SCRIPT.replace(
        "from klbench.tui.app import run_workbench",
        "from klbench.tui.app import run_workbench\n"
        "from klbench.tui.screens.main import MainScreen\n"
        "def broken(self):\n    value = 'hunter2' + 'hunter2'\n    raise RuntimeError('broken on purpose')\n"
        "MainScreen.do_pane_1 = broken",
    )
    it = terminal(script=script)
    it.until(drawn)
    it.press(b"1")
    assert it.ended() == 70
    assert it.restored()
    assert b"this is a defect of klbench" in it.raw
    assert b"hunter2hunter2" not in it.raw
    assert b"Traceback" not in it.raw
    (kept,) = (tmp_path / "20251129-dense").glob("crash-workbench-*.txt")
    assert "broken on purpose" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
