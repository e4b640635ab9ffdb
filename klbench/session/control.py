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


def new_socket_path() -> Path:
    return paths.socket_folder() / f"{secrets.token_hex(6)}.sock"


class ControlSocket:
    """Listens at `path` and hands each command to `accept`, which returns at once or raises KlbenchError."""

    def __init__(self, path: Path, accept: Callable[[Command], None]) -> None:
        self.path = path
        self._accept = accept
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
        if not _is_owner(writer.get_extra_info("socket")):
            writer.close()
            return
        self._clients.add(writer)
        try:
            while line := await reader.readline():
                writer.write(msgspec.json.encode(self._answer(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            # ValueError: a line longer than the limit; such a client gets no answer.
            pass
        finally:
            self._clients.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, line: bytes) -> Answer:
        try:
            command = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            refusal = {"what": "the runner does not know this command", "why": str(error), "next": ""}
            return Answer(ok=False, error=refusal)
        try:
            self._accept(command)
        except KlbenchError as error:
            return Answer(ok=False, error=error.as_dict())
        return Answer(ok=True)


def _is_owner(connection: Any) -> bool:
    """Whether the other end is this user. The folder's mode says so already; a second lock costs nothing."""
    if not sys.platform.startswith("linux"):
        return True
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", peer)
    return bool(user == os.getuid())
