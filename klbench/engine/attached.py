"""Finds our plugin in a server that somebody else started with the exports of `klbench env`.

Each set of exports has a control folder of its own, named by its nonce; the server's processes write their
presence there. Which folder belongs to a URL is proved in one of two ways: the process that listens on its
port is one of those that wrote, or a parent of one; or, where processes cannot be seen (another machine, a
container, a tunnel), a request of one token is sent to the URL under an id that holds the nonce, and the
plugin that writes this id down in the folder is that server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from klbench.engine.path_map import SAME_PATHS, PathMap
from klbench.engine.presence import Presence, check_presences, read_presences
from klbench.errors import KlbenchError, ServerError
from klbench.insitu.rids import RequestId

Ask = Callable[[list[str]], Awaitable[None]]
"""Has the server generate one token under each of these request ids."""
Agree = Callable[[int], Awaitable[bool]]
"""Whether so many requests of one token may be sent; waits for the user's answer."""

_ANSWER_LIMIT_S = 60.0
_WRITTEN_LIMIT_S = 5.0
_POLL_S = 0.02
_MOST_ASKED = 16
_LOG_TAIL_BYTES = 1 << 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class AttachedControl:
    """The control folder of an attached server; `note` says what was assumed."""

    control_dir: Path
    nonce: str
    presences: tuple[Presence, ...]
    note: str = ""

    @property
    def ranks(self) -> list[int]:
        return sorted({presence.rank for presence in self.presences if presence.rank is not None})


async def find_control(
    root: Path,
    url: str,
    ranks: int,
    *,
    ask: Ask | None = None,
    agree: Agree | None = None,
    paths: PathMap = SAME_PATHS,
) -> AttachedControl | None:
    """The control folder of the server at `url` with its `ranks` model processes, None where it has none of
    ours or it cannot be told which. Folders are looked for in `root` and where `paths` leads. Before `ask`
    it is asked to `agree`. Raises ServerError where our plugin failed in that server."""
    candidates = _candidates(root, paths)
    if not candidates:
        return None
    listeners = _listeners(url)
    for folder, presences in candidates if listeners else []:
        own = [presence for presence in presences if _belongs(presence.pid, listeners)]
        if own:
            check_presences(own, ranks)
            return AttachedControl(folder, folder.name, tuple(own))
    if ask is None:
        return None
    candidates = candidates[:_MOST_ASKED]
    if agree is not None and not await agree(len(candidates)):
        return None
    found = await _asked(candidates, ask)
    if found is None:
        return None
    folder, presences = found
    check_presences(presences, ranks)
    note = f"its plugin writes to {folder}: a request of one token was found there"
    return AttachedControl(folder, folder.name, tuple(presences), note)


def _candidates(root: Path, paths: PathMap) -> list[tuple[Path, list[Presence]]]:
    """Folders in which a server's processes wrote, the newest first: ours, and those the user pointed at."""
    places = [(folder, True) for folder in _folders(root)]
    for _, here in paths.pairs:
        places += [(folder, False) for folder in (here, *_folders(here), *_folders(here / root.name))]
    found: dict[Path, tuple[float, list[Presence]]] = {}
    for folder, must_be_ours in places:
        with contextlib.suppress(ServerError, OSError):
            status = folder.lstat()
            ours = status.st_uid == os.getuid() and not status.st_mode & 0o077
            if not stat.S_ISDIR(status.st_mode) or (must_be_ours and not ours):
                continue
            if presences := read_presences(folder, folder.name):
                found.setdefault(folder, (status.st_mtime, presences))
    newest = sorted(found.items(), key=lambda item: -item[1][0])
    return [(folder, presences) for folder, (_, presences) in newest]


def _folders(parent: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(parent.iterdir())
    return []


async def _asked(
    candidates: Sequence[tuple[Path, list[Presence]]], ask: Ask
) -> tuple[Path, list[Presence]] | None:
    """The candidate whose plugin wrote down the request that was sent under its nonce."""
    number = int(time.time()) % 900_000_000
    ids = [str(RequestId(folder.name, number, "warming", False, 0)) for folder, _ in candidates]
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            await ask(ids)
    except (KlbenchError, TimeoutError):
        return None
    deadline = time.monotonic() + _WRITTEN_LIMIT_S
    while True:
        for rid, candidate in zip(ids, candidates, strict=True):
            if _is_written(candidate[0], rid):
                return candidate
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(_POLL_S)


def _is_written(folder: Path, rid: str) -> bool:
    """Whether a rank's log of forwards ends with this request."""
    for log in folder.glob("forwards-*.jsonl"):
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LOG_TAIL_BYTES, 0))
            if f'"{rid}"'.encode() in file.read(_LOG_TAIL_BYTES):
                return True
    return False


def _listeners(url: str) -> set[int]:
    """The processes that listen on the URL's port of this machine; empty where they cannot be seen."""
    if not is_this_machine(url):
        return set()
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(psutil.Error, OSError):
        return {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        }
    return set()


def is_this_machine(url: str) -> bool:
    """Whether the URL's host is an address of this machine; a name is not looked up."""
    host = urlsplit(url).hostname or ""
    addresses: Sequence[str] = [
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
    ]
    return host in _LOOPBACK or host in addresses


def _belongs(pid: int, listeners: set[int]) -> bool:
    """Whether the process is one of the listeners or a descendant of one."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return pid in listeners or any(parent.pid in listeners for parent in process.parents())
    return False
