"""Starts one server through the keeper and ends it; the rest of klbench never touches its processes.

Invariants: the server and everything below it ends when this process ends, however that happens; only what
carries this launch's nonce in its environment is ever ended by force.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from klbench.engine import keeper
from klbench.engine.phases import last_lines, own_error
from klbench.errors import ServerError

STOP_GRACE_S = 5.0
_STOP_LIMIT_S = STOP_GRACE_S + 15.0
_TAIL_BYTES = 512 * 1024
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--hf-token")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One server to start. `arguments` is everything after `python -m sglang.launch_server`."""

    python: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    control_dir: Path
    nonce: str

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", "sglang.launch_server", *self.arguments]

    def as_line(self) -> str:
        """The command as it can be copied and repeated: with what we set in the environment, no secrets."""
        changed = [
            f"{name}={shlex.quote(value)}"
            for name, value in sorted(self.environment.items())
            if os.environ.get(name) != value
        ]
        return " ".join([*changed, shlex.join(hide_secrets(self.command))])


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments with the values of keys and passwords replaced."""
    shown: list[str] = []
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET_FLAGS:
            shown.append("***")
        elif separator and name in _SECRET_FLAGS:
            shown.append(f"{name}=***")
        else:
            shown.append(argument)
    return shown


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_holder(port: int) -> str | None:
    """Who listens on `port` of this machine: "pid 4711 (python)", as far as we may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                if connection.pid is None:
                    return "a process of another user"
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server ended. `expected`: because it was asked to."""

    expected: bool
    exit_code: int | None
    why: str
    last_lines: tuple[str, ...]


class ServerProcess:
    """A started server. Create it with `start`, from the main thread of the process that owns it."""

    def __init__(self, spec: LaunchSpec, process: subprocess.Popen[bytes], status_file: Path) -> None:
        self.spec = spec
        self.started_at = time.monotonic()
        self._process = process
        self._status_file = status_file
        self._stopping = False

    @classmethod
    def start(cls, spec: LaunchSpec) -> ServerProcess:
        """Starts the server; returns at once. Raises ServerError if its Python cannot be run."""
        if not os.access(spec.python, os.X_OK):
            raise ServerError(
                f"cannot run {spec.python}",
                why="it is not an executable file",
                next="name the Python that has sglang with --server-python",
            )
        status_file = spec.control_dir / f"exit-{spec.nonce}.json"
        command = [
            *(sys.executable, "-I", "-S", keeper.__file__),
            *(str(os.getpid()), str(STOP_GRACE_S), str(status_file), "--"),
            *spec.command,
        ]
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
            process = subprocess.Popen(
                command,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(spec, process, status_file)

    @property
    def keeper_pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def pids(self) -> list[int]:
        """The server's processes: everything below the keeper."""
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        return []

    async def wait_ended(self) -> Ended:
        """Waits until the server has ended, by whatever cause."""
        await self._exited()
        return self.ended()

    async def _exited(self) -> None:
        """Returns when the keeper has exited: the kernel makes its pidfd readable then."""
        if not self.alive:
            return
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(self._process.pid)
        try:
            loop.add_reader(descriptor, lambda: None if gone.done() else gone.set_result(None))
            await gone
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def ended(self) -> Ended:
        """How it ended; only once it has. What its keeper could not end any more is ended here."""
        end_processes_of(self.spec.nonce)
        asked, code = self._stopping, self._process.returncode
        with contextlib.suppress(OSError, ValueError):
            status = json.loads(self._status_file.read_text(encoding="utf-8"))
            code = int(status["exit_code"])
            asked = asked or bool(status["asked"])
        log = self.log_tail()
        error = None if asked else own_error(log)
        why = "stopped" if asked else _exit_text(code, explained=error is not None)
        if error is not None:
            why = f"{error.headline} ({why})"
        return Ended(asked, code, why, error.lines if error is not None else tuple(last_lines(log)))

    def log_tail(self, size_bytes: int = _TAIL_BYTES) -> str:
        """The end of the log, as text."""
        try:
            with self.spec.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - size_bytes))
                return file.read(size_bytes).decode("utf-8", errors="replace")
        except OSError:
            return ""

    async def stop(self) -> Ended:
        """Ends the server and its whole tree: TERM, then KILL. Safe to call more than once."""
        self._stopping = True
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited(), _STOP_LIMIT_S)
        self._kill()
        return self.ended()

    def kill_now(self) -> None:
        """Ends the tree without waiting politely; for the last moments of the owner."""
        self._stopping = True
        self._kill()
        end_processes_of(self.spec.nonce)

    def _kill(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()


def end_processes_of(nonce: str) -> list[int]:
    """Kills what still carries this launch's nonce in its environment; returns the pids.

    Only when a keeper was killed itself can anything be left.
    """
    ours: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get("KLBENCH_NONCE") == nonce:
                ours.append(process)
    for process in ours:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ours, timeout=5)
    return [process.pid for process in ours]


def _exit_text(code: int | None, *, explained: bool) -> str:
    """`explained`: the log names the error; sglang kills itself after one."""
    if code is None:
        return "exit code unknown"
    if code > 128:
        number = code - 128
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        unexplained = number == signal.SIGKILL and not explained
        hint = ", as the kernel does when memory runs out" if unexplained else ""
        return f"exit code {code}: ended by {name}{hint}"
    return f"exit code {code}"
