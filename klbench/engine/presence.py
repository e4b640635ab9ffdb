"""Proof that our plugin is in the server: the presence files that each of its processes writes.

sglang logs and swallows what a plugin raises, so silence proves nothing: every rank must have written
`model_loaded`, with this launch's nonce and without an error. klbench/insitu/plugin.py has the format.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.errors import ServerError

_LARGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Presence:
    """What one process of the server said of itself."""

    role: str
    rank: int | None
    pid: int
    version: str | None
    stage: str
    hooks: tuple[str, ...]
    faults: tuple[dict[str, Any], ...]
    error: str | None


def read_presences(control_dir: Path, nonce: str) -> list[Presence]:
    """The presences with this nonce, by role and rank. A file that is no presence raises ServerError."""
    found = []
    for path in sorted(control_dir.glob("presence-*.json")):
        try:
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                raise ValueError("larger than any presence")
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["nonce"] != nonce:
                continue
            presence = Presence(
                role=str(content["role"]),
                rank=None if content["rank"] is None else int(content["rank"]),
                pid=int(content["pid"]),
                version=None if content["version"] is None else str(content["version"]),
                stage=str(content["stage"]),
                hooks=tuple(map(str, content["hooks"])),
                faults=tuple(dict(fault) for fault in content["faults"]),
                error=None if content["error"] is None else str(content["error"]),
            )
        except FileNotFoundError:
            continue  # renamed to its rank between the listing and the reading
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{path} is no presence file", why=str(error)) from None
        found.append(presence)
    return found


def check_presences(presences: list[Presence], ranks: int) -> None:
    """Raises ServerError unless each of `ranks` model processes is present, ready and without an error."""
    for presence in presences:
        if presence.error is not None:
            where = presence.role if presence.rank is None else f"{presence.role} of rank {presence.rank}"
            raise ServerError(
                f"klbench's plugin failed in the server's {where}",
                why=presence.error.strip(),
                next="measure without it: start the server yourself and attach with --url",
            )
    loaded = {presence.rank for presence in presences if presence.stage == "model_loaded"}
    if len(loaded) < ranks:
        raise ServerError(
            f"klbench's plugin is present in {len(loaded)} of {ranks} ranks of the server",
            why="the server's Python did not load it; SGLANG_PLUGINS may name others only, or PYTHONPATH "
            "may be replaced on the way",
            next="check that the server's environment reaches its Python unchanged",
        )


async def wait_for_presences(
    control_dir: Path, nonce: str, ranks: int, limit_s: float = 60
) -> list[Presence]:
    """The presences, once all ranks are there; files appear a moment before the server says ready."""
    deadline = time.monotonic() + limit_s
    while True:
        presences = read_presences(control_dir, nonce)
        try:
            check_presences(presences, ranks)
        except ServerError:
            if any(presence.error for presence in presences) or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return presences
