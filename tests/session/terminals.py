"""The real program in a real pseudo-terminal, read through a terminal emulator."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading

import pyte

from tests.emulated import text_of


class Terminal:
    """`klbench ARGUMENTS` in a terminal of its own; losing it is what a dropped connection does."""

    def __init__(self, *arguments, environment, rows=40, columns=240):
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "klbench", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**environment, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._changed = threading.Condition()
        self._gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        """Takes what is written as it comes: a program whose terminal nobody reads stands still."""
        while True:
            try:
                ready = select.select([self._master], [], [], 0.2)[0]
                data = os.read(self._master, 65536) if ready else None
            except (OSError, ValueError):
                break
            if data == b"":
                break
            if data:
                with self._changed:
                    self._stream.feed(data)
                    self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    @property
    def text(self):
        return text_of(self.screen)

    def until(self, wanted, limit_s=1800.0):
        """Waits until `wanted(text)`; fails at the limit, or when the program has ended, with its screen."""
        with self._changed:
            came = self._changed.wait_for(lambda: wanted(self.text) or self._gone, limit_s)
            assert came, f"not seen in time:\n{self.text}"
            assert wanted(self.text), f"it ended:\n{self.text}"

    def press(self, keys):
        os.write(self._master, keys)

    def hang_up(self):
        """The terminal is gone, as when a connection drops; returns the exit code."""
        self._close()
        return self.process.wait(600)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._close()

    def _close(self):
        if self._master >= 0:
            master, self._master = self._master, -1
            self._reader.join(timeout=60)
            os.close(master)
