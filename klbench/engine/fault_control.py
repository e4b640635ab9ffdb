"""Arms and disarms faults in a demo server that was launched with `LaunchOptions(fault_lab=True)`.

    control = FaultControl(server.control_dir, server.nonce, ranks)
    await control.arm("key-write:step=4")
    ...
    fired = await control.disarm()     [Fired("key-write", count=16, first_rid="klb-a1b2-2g-0", ...)]

What a fault has left in the prefix cache stays: flush before arming and after disarming. The other side is
klbench/insitu/faults.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.errors import UndecidedError

_CONTROL = "fault-control.json"
_ACK_LIMIT_S = 60.0
_POLL_S = 0.02
_MAX_JSON_BYTES = 1 << 20

_sequence = itertools.count(int(time.time()))


@dataclass(frozen=True, slots=True)
class Fired:
    """What one fault did while it was armed, on one rank. Positions are absolute row positions."""

    fault: str
    rank: int
    count: int
    first_rid: str | None
    first_positions: tuple[int, ...]
    first_rows: int
    """How many rows shared the call of the first firing."""


class FaultControl:
    """The switch of one server's fault lab. `ranks` are its model processes."""

    def __init__(self, control_dir: Path, nonce: str, ranks: Collection[int]) -> None:
        self._control_dir = control_dir
        self._nonce = nonce
        self._ranks = sorted(ranks)

    async def arm(self, faults: str) -> list[Fired]:
        """Arms exactly these faults, spelled as in the catalogue; returns what those armed before did.

        Raises UndecidedError where a rank refuses: the model has no such place, or there is no permission.
        """
        return await self._ask(faults)

    async def disarm(self) -> list[Fired]:
        """Disarms all faults; returns what they did."""
        return await self._ask(None)

    async def _ask(self, faults: str | None) -> list[Fired]:
        seq = next(_sequence)
        path = self._control_dir / _CONTROL
        draft = path.with_name(f".{_CONTROL}.draft")
        draft.write_text(json.dumps({"seq": seq, "nonce": self._nonce, "faults": faults}), encoding="utf-8")
        os.replace(draft, path)
        deadline = time.monotonic() + _ACK_LIMIT_S
        return [fired for rank in self._ranks for fired in await self._answer(rank, seq, deadline)]

    async def _answer(self, rank: int, seq: int, deadline: float) -> list[Fired]:
        path = self._control_dir / f"fault-ack-{rank}.json"
        while True:
            answer = _read(path)
            if answer.get("seq") == seq and answer.get("nonce") == self._nonce:
                break
            if time.monotonic() > deadline:
                raise UndecidedError(
                    f"rank {rank} of the server does not answer about faults",
                    why=f"no acknowledgement within {_ACK_LIMIT_S:.0f} s in {self._control_dir}",
                    next="only a demo server that klbench launched for the fault lab arms faults",
                )
            await asyncio.sleep(_POLL_S)
        if answer.get("ok") is not True:
            raise UndecidedError(f"rank {rank} did not arm the fault", why=str(answer.get("error"))[:2000])
        return [_fired(rank, entry) for entry in answer.get("disarmed", [])]


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _fired(rank: int, entry: dict[str, Any]) -> Fired:
    first = entry.get("first") or {}
    return Fired(
        fault=str(entry.get("fault")),
        rank=rank,
        count=int(entry.get("count", 0)),
        first_rid=first.get("rid"),
        first_positions=tuple(int(position) for position in first.get("positions", ())),
        first_rows=int(first.get("rows", 0)),
    )
