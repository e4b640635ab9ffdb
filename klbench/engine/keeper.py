"""The process between a runner and its server: ends the server's whole tree when the runner is gone.

    python -I -S keeper.py PARENT_PID GRACE_S STATUS_FILE -- COMMAND...

Standard library only, run by path, so that it starts in milliseconds. Invariants:

- it ends with its parent: the kernel sends TERM when the thread that started it ends (so it must be started
  from the main thread), and it looks itself whether its parent is still the one it was started by;
- it is the reaper of every descendant, so a scheduler that made its own group or lost its parent is still
  found and ended: TERM to the server first, KILL to everything that is left after `GRACE_S` seconds;
- when it is killed itself the kernel kills the server, and sglang's processes watch their own parent.

Its exit code is the server's (128 + n for a signal n). STATUS_FILE gets one JSON line when the server ended:
`{"exit_code": 137, "signal": 9, "asked": false}`; `asked` says whether ending was asked for.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.5
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def prctl(option: int, value: int) -> None:
    """Calls prctl(2). Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(root: int) -> list[int]:
    """The pids of all processes below `root`, from /proc, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may hold anything; what follows the last one is fixed.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found.extend(below)
        pending.extend(below)
    return found


def _start(command: Sequence[str], keeper: int) -> int:
    """Starts the server in a session of its own, killed by the kernel if the keeper dies."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        os.execvpe(command[0], list(command), os.environ)
    except BaseException as error:
        sys.stderr.write(f"klbench keeper: cannot run {command[0]}: {error}\n")
        sys.stderr.flush()
    os._exit(127)


class Keeper:
    """Waits for the server, for its own parent and for signals."""

    def __init__(self, parent: int, grace_s: float, status_file: str) -> None:
        self._parent = parent
        self._grace_s = grace_s
        self._status_file = status_file
        self._server = 0
        self._wait_status: int | None = None
        self._asked = False

    def run(self, command: Sequence[str]) -> int:
        """Starts the server, keeps it, ends the tree; returns the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._parent:
            return 128 + signal.SIGTERM
        self._server = _start(command, os.getpid())
        while self._wait_status is None and not self._asked:
            got = signal.sigtimedwait(_WATCHED, _LOOK_EVERY_S)
            self._reap()
            if (got is not None and got.si_signo != signal.SIGCHLD) or os.getppid() != self._parent:
                self._asked = True
        self._end_tree()
        return self._report()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._server:
                    self._wait_status = status

    def _end_tree(self) -> None:
        if self._wait_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGTERM)
            deadline = time.monotonic() + self._grace_s
            while self._wait_status is None and time.monotonic() < deadline:
                signal.sigtimedwait((signal.SIGCHLD,), 0.05)
                self._reap()
        # What is left is killed, again and again, for a process may still be starting another.
        while left := descendants(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait((signal.SIGCHLD,), 0.02)
            self._reap()

    def _report(self) -> int:
        status = self._wait_status or 0
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = 128 + ended_by if ended_by is not None else os.WEXITSTATUS(status)
        line = json.dumps({"exit_code": code, "signal": ended_by, "asked": self._asked})
        with contextlib.suppress(OSError):
            draft = self._status_file + ".draft"
            with open(draft, "w", encoding="utf-8") as file:
                file.write(line + "\n")
            os.replace(draft, self._status_file)
        return code


def main(arguments: Sequence[str]) -> int:
    parent, grace_s, status_file, separator, *command = arguments
    if separator != "--" or not command:
        sys.stderr.write("usage: keeper.py PARENT_PID GRACE_S STATUS_FILE -- COMMAND...\n")
        return 2
    return Keeper(int(parent), float(grace_s), status_file).run(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
