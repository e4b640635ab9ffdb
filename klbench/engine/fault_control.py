"""Arms and disarms faults in a demo server that was launched with `LaunchOptions(fault_lab=True)`.

    control = FaultControl(server.control_dir, server.nonce, ranks)
    await control.arm("key-write:step=4")
    ...
    fired = await control.disarm()     [Fired("key-write", count=16, first_rid="klb-a1b2-2g-0", ...)]

What a fault has left in the prefix cache stays: flush before arming and after disarming. The other side is
klbench/insitu/faults.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klbench.engine.control_file import ControlFile, Wording

WORDING = Wording(
    about="faults",
    refused="did not arm the fault",
    silent_next="only a demo server that klbench launched for the fault lab arms faults",
)


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
        self._file = ControlFile(control_dir, nonce, ranks, "fault", WORDING, field="faults")

    async def arm(self, faults: str) -> list[Fired]:
        """Arms exactly these faults, spelled as in the catalogue; returns what those armed before did.

        Raises UndecidedError where a rank refuses: the model has no such place, or there is no permission.
        """
        return await self._ask(faults)

    async def disarm(self) -> list[Fired]:
        """Disarms all faults; returns what they did."""
        return await self._ask(None)

    async def _ask(self, faults: str | None) -> list[Fired]:
        answers = await self._file.ask(faults)
        return [_fired(rank, entry) for rank in answers for entry in answers[rank].get("disarmed", [])]


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
