"""The client side: reach the runner of a session, start one, tell it what to do.

A client reads by tailing the event log (log.py) and sends through the runner's socket; there is no other way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from klbench.errors import KlbenchError, ServerError, UndecidedError, UsageError
from klbench.session.commands import Command, Control, Ping
from klbench.session.control import Answer
from klbench.session.folder import SessionFolder, make_session, new_session_path
from klbench.session.interruption import interrupted, start_to_continue
from klbench.session.reading import find_runner, read_state
from klbench.session.request import StartRequest

ANSWER_TIMEOUT_S = 20.0
"""A runner answers a command from its event loop, which nothing blocks for long; its machine may be busy."""
SPAWN_TIMEOUT_S = 120.0
"""Imports on a cold, slow disk of a busy machine; measured 0.4 s warm."""


class Attachment:
    """A connection to a runner; while it is open, an idle runner stays."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self.name = secrets.token_hex(8)
        """By which it knows itself in `ControlTaken`."""

    async def send(self, command: Command) -> None:
        """Sends the command. Raises the runner's refusal as UsageError, a lost runner as ServerError."""
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    self._writer.write(msgspec.json.encode(command) + b"\n")
                    await self._writer.drain()
                    line = await self._reader.readline()
            except (OSError, TimeoutError, ValueError) as error:
                raise _lost(str(error)) from error
        if not line:
            raise _lost("it closed the connection")
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _lost(f"its answer cannot be read: {error}") from error
        if not answer.ok:
            refusal = answer.error or {}
            raise UsageError(
                refusal.get("what", "the runner refused"),
                why=refusal.get("why", ""),
                next=refusal.get("next", ""),
            )

    async def take_control(self, *, over: bool = False) -> None:
        """Makes this connection the one whose commands are taken. Raises UsageError where another terminal
        has control and `over` does not take it away."""
        await self.send(Control(client=self.name, terminal=terminal_name(), over=over))

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def terminal_name() -> str:
    """Which terminal this is, as `who` shows it: pts/3; empty without one."""
    with contextlib.suppress(OSError):
        return os.ttyname(0).removeprefix("/dev/")
    return ""


async def attach(folder: SessionFolder) -> Attachment:
    """Connects to the session's runner. Raises UsageError when there is none, or none that can be reached."""
    lock = find_runner(folder)
    if lock is None:
        raise UsageError(
            f"no runner works on the session {folder.name}",
            next=f"klbench open {folder.path} shows what it holds",
        )
    if not lock.local:
        raise UsageError(
            f"the session's runner is elsewhere ({lock.where})",
            why="its socket can be reached there only",
            next="run klbench open there, or read here without control",
        )
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(lock.socket)
    except (OSError, TimeoutError) as error:
        raise _lost(str(error)) from error
    return Attachment(reader, writer)


async def send(folder: SessionFolder, command: Command) -> None:
    """Sends one command and hangs up."""
    attachment = await attach(folder)
    try:
        await attachment.send(command)
    finally:
        await attachment.close()


def _lost(why: str) -> KlbenchError:
    return ServerError(
        "the runner does not answer", why=why, next="klbench sessions shows what is left of it"
    )


class RunnerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a new runner reads from its standard input: nothing of it is on a command line."""

    start: StartRequest
    run_first: bool = True
    """Run the helpers as soon as the server is ready."""
    continue_run: bool = False
    """Continue an interrupted run instead of running anew."""


async def start_session(
    start: StartRequest, *, session: Path | None = None, run_first: bool = True
) -> SessionFolder:
    """Makes (or continues) a session with a detached runner at work, and returns once it answers."""
    target, options = start.as_shown()
    folder = make_session(session or new_session_path(start.target.label), target, options)
    await spawn_runner(folder, start, run_first=run_first)
    return folder


def recorded_start(folder: SessionFolder) -> StartRequest:
    """What a session was last started with. Raises UsageError where a key would be missing."""
    return start_to_continue(folder, read_state(folder))


async def continue_session(folder: SessionFolder) -> str:
    """Starts a runner that takes up the session's interrupted run, or only its server where none was
    interrupted; returns what it does. Raises UsageError where the session cannot be continued."""
    state = read_state(folder)
    start = start_to_continue(folder, state)
    found = interrupted(state)
    await spawn_runner(folder, start, run_first=found is not None, continue_run=True)
    return found.in_words if found is not None else "its server is started again"


async def start_server_again(folder: SessionFolder) -> str:
    """Starts a runner that has the session's server and waits for what to do; returns what it does. Raises
    UsageError where the session cannot be continued."""
    await spawn_runner(folder, start_to_continue(folder, read_state(folder)), run_first=False)
    return "its server is started again"


async def spawn_runner(
    folder: SessionFolder, start: StartRequest, *, run_first: bool, continue_run: bool = False
) -> None:
    """Starts the session's runner in a session of its own, where no hang-up of this terminal reaches it."""
    if (lock := find_runner(folder)) is not None:
        raise UsageError(
            f"a runner works on the session already ({lock.where})",
            next=f"klbench open {folder.path}",
        )
    order = msgspec.json.encode(RunnerOrder(start=start, run_first=run_first, continue_run=continue_run))
    process = _spawn(folder, order)
    deadline = time.monotonic() + SPAWN_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UndecidedError(
                f"the runner ended at once with exit code {process.returncode}",
                why=_last_line(folder.runner_log),
                next=f"see {folder.runner_log}",
            )
        lock = folder.read_lock()
        if lock is not None and lock.pid == process.pid:
            with contextlib.suppress(KlbenchError):
                await send(folder, Ping())
                return
        await asyncio.sleep(0.02)
    process.kill()
    raise UndecidedError(
        f"the runner did not answer within {SPAWN_TIMEOUT_S:.0f} s", next=f"see {folder.runner_log}"
    )


def _spawn(folder: SessionFolder, order: bytes) -> subprocess.Popen[bytes]:
    with open(folder.runner_log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "klbench", "runner", "--session", str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    # A runner that died at once is reported by its exit code, not by the broken pipe.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(order)
    return process


def _last_line(file: Path) -> str:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
