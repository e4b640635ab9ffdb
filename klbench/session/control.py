"""The runner's socket: small commands in, accepted or refused out, for the owner alone.

One JSON object a line, answered by one line; commands.py lists them. An open connection means that a client
is attached, which keeps an idle runner alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec

from klbench import paths
from klbench.errors import KlbenchError
from klbench.session.commands import COMMAND_TYPES, Command

MAX_COMMAND_BYTES = 64 * 1024

_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[COMMAND_TYPES])  # noqa: UP007


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`ok` means accepted; what comes of it is read from the event log."""

    ok: bool
    error: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """One connection; each is itself alone. `pid` is the system's word, 0 where it says nothing."""

    pid: int


def new_socket_path() -> Path:
    return paths.socket_folder() / f"{secrets.token_hex(6)}.sock"


class ControlSocket:
    """Listens at `path` and hands each command to `accept`, which returns at once or raises KlbenchError.

    `gone` hears of every connection that ended, however it did.
    """

    def __init__(
        self,
        path: Path,
        accept: Callable[[Command, Client], None],
        gone: Callable[[Client], None] = lambda _client: None,
    ) -> None:
        self.path = path
        self._accept = accept
        self._gone = gone
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()

    @property
    def attached(self) -> int:
        """How many clients hold a connection."""
        return len(self._clients)

    async def open(self) -> None:
        old = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, path=str(self.path), limit=MAX_COMMAND_BYTES
            )
        finally:
            os.umask(old)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for client in tuple(self._clients):
                client.close()
            self._server = None
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, user = _peer(writer.get_extra_info("socket"))
        if user != os.getuid():
            # The folder's mode keeps others out already; a second lock costs nothing.
            writer.close()
            return
        client = Client(pid)
        self._clients.add(writer)
        try:
            while line := await reader.readline():
                writer.write(msgspec.json.encode(self._answer(line, client)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            # ValueError: a line longer than the limit; such a client gets no answer.
            pass
        finally:
            self._clients.discard(writer)
            self._gone(client)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, line: bytes, client: Client) -> Answer:
        try:
            command = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            refusal = {"what": "the runner does not know this command", "why": str(error), "next": ""}
            return Answer(ok=False, error=refusal)
        try:
            self._accept(command, client)
        except KlbenchError as error:
            return Answer(ok=False, error=error.as_dict())
        return Answer(ok=True)


def _peer(connection: Any) -> tuple[int, int]:
    """The other end's process and user; where the system cannot say, no process and this user."""
    if not sys.platform.startswith("linux"):
        return 0, os.getuid()
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user
