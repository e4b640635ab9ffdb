"""Finds our plugin in a server that somebody else started with the exports of `klbench env`.

Each set of exports has a control folder of its own below one root, named by its nonce; the server's processes
write their presence there. Which folder belongs to a URL is proved by the process that listens on its port:
it is one of those that wrote, or a parent of one. Where the listener cannot be seen (another host, a
container), the only folder whose server answers is taken, and that is said.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from klbench.engine.capture_control import CaptureControl
from klbench.engine.presence import Presence, check_presences, read_presences
from klbench.errors import KlbenchError, ServerError

_ANSWER_LIMIT_S = 2.0
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


async def find_control(root: Path, url: str, ranks: int) -> AttachedControl | None:
    """The control folder of the server at `url` with its `ranks` model processes, None where it has none of
    ours or it cannot be told which. Raises ServerError where our plugin failed in that server."""
    candidates = _candidates(root)
    listeners = _listeners(url)
    if listeners:
        for folder, presences in candidates:
            own = [presence for presence in presences if _belongs(presence.pid, listeners)]
            if own:
                check_presences(own, ranks)
                return AttachedControl(folder, folder.name, tuple(own))
        return None
    answering = []
    for folder, presences in candidates:
        with contextlib.suppress(ServerError):
            check_presences(presences, ranks)
            found = AttachedControl(folder, folder.name, tuple(presences))
            if await _answers(found):
                answering.append(found)
    if len(answering) != 1:
        return None
    (only,) = answering
    note = f"taken for the server of {only.control_dir}: the only one with klbench's plugin that answers"
    return AttachedControl(only.control_dir, only.nonce, only.presences, note)


def _candidates(root: Path) -> list[tuple[Path, list[Presence]]]:
    """Folders of ours in which a server's processes wrote, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                continue
            with contextlib.suppress(ServerError):
                if presences := read_presences(folder, folder.name):
                    found.append((status.st_mtime, folder, presences))
    return [(folder, presences) for _, folder, presences in sorted(found, key=lambda item: -item[0])]


def _listeners(url: str) -> set[int]:
    """The processes that listen on the URL's port of this machine; empty where they cannot be seen."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if (parts.hostname or "") not in _LOOPBACK and not _is_this_machine(parts.hostname or ""):
        return set()
    with contextlib.suppress(psutil.Error, OSError):
        return {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        }
    return set()


def _is_this_machine(host: str) -> bool:
    addresses: Sequence[str] = [
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
    ]
    return host in addresses


def _belongs(pid: int, listeners: set[int]) -> bool:
    """Whether the process is one of the listeners or a descendant of one."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return pid in listeners or any(parent.pid in listeners for parent in process.parents())
    return False


async def _answers(found: AttachedControl) -> bool:
    """Whether all ranks of the folder's server acknowledge that nothing is to be captured."""
    control = CaptureControl(found.control_dir, found.nonce, found.ranks)
    try:
        await control.close(_ANSWER_LIMIT_S)
    except (KlbenchError, OSError):
        return False
    return True
