"""The end of a process whose terminal is gone, whatever it is stuck in.

What draws may wait for ever for a terminal that takes nothing any more, and then no signal is heard either:
the process would stay, with control of its session. A thread of its own waits for the hang-up and, when the
process does not end by itself soon after, ends it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import threading
from collections.abc import Iterator

from klbench.errors import ExitCode

GRACE_S = 3.0
"""An orderly end took 0.5 to 1 s on two busy cores."""


@contextlib.contextmanager
def ends_with_terminal(terminal: int = 0, grace_s: float = GRACE_S) -> Iterator[None]:
    """Inside, the process ends with ExitCode.HUNG_UP at the latest `grace_s` after its terminal is gone.

    Raises OSError where it is gone already: nobody would see what is drawn, and no hang-up follows.
    """
    if not os.isatty(terminal):
        if _went_away(terminal):
            raise OSError(errno.EIO, "the terminal is gone")
        yield
        return
    ended = threading.Event()
    wake, waker = os.pipe()

    def watch() -> None:
        poll = select.poll()
        # No events are asked for: a hang-up is always told, and keys are left to whoever reads them.
        poll.register(terminal, 0)
        poll.register(wake, select.POLLIN)
        told = dict(poll.poll())
        # A system that cannot watch a terminal in this way says so (POLLNVAL), and nothing is watched.
        gone = told.get(terminal, 0) & (select.POLLHUP | select.POLLERR)
        if gone and not ended.wait(grace_s):
            os._exit(ExitCode.HUNG_UP)

    thread = threading.Thread(target=watch, name="klbench-hang-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        os.write(waker, b"\0")
        thread.join()
        os.close(wake)
        os.close(waker)


def _went_away(terminal: int) -> bool:
    """Whether this was a terminal: one that hung up is none any more for `isatty`."""
    try:
        device = stat.S_ISCHR(os.fstat(terminal).st_mode)
    except OSError:  # closed from the beginning
        return False
    poll = select.poll()
    poll.register(terminal, 0)
    return device and any(told & select.POLLHUP for _, told in poll.poll(0))
