"""What an earlier klbench may have left behind: processes of a launch of ours whose keeper is gone.

A launch ends with its runner, so this needs a keeper to be killed before it could end the rest; then nothing
else ever would. Only what carries a launch of ours in its environment is meant: the nonce
and the private control folder beside the server's log. A server that was started with the exports of
`klbench env` is its user's own and never counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from klbench.core.text import counted
from klbench.engine.process import end_processes_of


@dataclass(frozen=True, slots=True)
class Orphans:
    """The processes of one launch that nobody keeps; `place` is the folder of that launch."""

    nonce: str
    place: Path
    pids: tuple[int, ...]

    @property
    def sentence(self) -> str:
        processes = counted(len(self.pids), "process", "processes")
        return f"{processes} of a server whose klbench is gone ({self.place}): {self.pids}"

    def end(self) -> list[int]:
        """Kills them and whatever else carries their nonce by now; returns the pids."""
        return end_processes_of(self.nonce)


def find_orphans() -> list[Orphans]:
    """Every launch of this user's without its keeper, in the order of their folders."""
    launches: dict[tuple[str, Path], list[int]] = {}
    kept: set[str] = set()
    for process, environment in _own_processes():
        nonce, control = environment.get("KLBENCH_NONCE"), environment.get("KLBENCH_INSITU_DIR")
        if not nonce or not control:
            continue
        place = Path(control).parent
        if Path(control).name != "control" or not (place / "server.log").is_file():
            continue
        launches.setdefault((nonce, place), []).append(process.pid)
        with contextlib.suppress(psutil.Error):
            # A keeper of any copy of klbench: it names the file that is its launch's alone.
            if any(argument.endswith(f"/exit-{nonce}.json") for argument in process.cmdline()):
                kept.add(nonce)
    return [
        Orphans(nonce, place, tuple(sorted(pids)))
        for (nonce, place), pids in sorted(launches.items(), key=lambda launch: str(launch[0][1]))
        if nonce not in kept
    ]


def _own_processes() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.uids().real == os.getuid() and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.environ()
