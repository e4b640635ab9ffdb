"""Rows of state in words: layer, K or V, position, pool slot, who wrote them and who read something else.

The K row of position 175 (layer 1, pool slot 412) is not what was written: request 0 wrote it in the
warming arm, the generation arm read other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from klbench.core.trace import Arm

_NAMED = 4
"""Pool slots that a sentence names."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """State of one layer at some positions; of a recurrent slot, the position whose row it was left by."""

    layer: int | None
    arguments: tuple[str, ...]
    """"k" and "v" of K/V rows, names of recurrent states otherwise."""
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    """The pool slot of each position."""
    read_in: Arm | None
    """The arm that read what was not written; None where reading was right."""
    writer_request: int | None
    """Who wrote it last; None where that was not seen."""
    written_in: Arm | None

    @property
    def kv(self) -> bool:
        return set(self.arguments) <= {"k", "v"}

    def as_dict(self) -> dict[str, Any]:
        return {
            "state_position": self.positions[0],
            "state_positions": len(self.positions),
            "state_layer": self.layer,
            "arguments": list(self.arguments),
            "slot": self.slots[0],
            "slots": list(self.slots[:_NAMED]),
            "read_in": self.read_in.name.lower() if self.read_in is not None else None,
            "written_in": self.written_in.name.lower() if self.written_in is not None else None,
            "writer_request": self.writer_request,
        }

    @property
    def what(self) -> str:
        """`K row of position 175 (layer 1, pool slot 412)`."""
        kind = " and ".join(name.upper() if self.kv else name for name in self.arguments)
        many = len(self.positions) > 1
        first, last = self.positions[0], self.positions[-1]
        where = str(first)
        if many:
            joined = "to" if last - first + 1 == len(self.positions) else "...,"
            where = f"{first} {joined} {last}"
        noun = "row" if self.kv else "state"
        slots = ", ".join(map(str, self.slots[:_NAMED])) + (", ..." if len(self.slots) > _NAMED else "")
        place = [f"layer {self.layer}"] if self.layer is not None else []
        place.append(f"pool slot{'s' if many else ''} {slots}")
        behind = "of" if self.kv else "behind"
        return f"{kind} {noun}{'s' if many else ''} {behind} position{'s' if many else ''} {where} " + (
            f"({', '.join(place)})"
        )

    def sentence(self) -> str:
        """The finding: a wrong restore where `read_in` is set, else a wrong write."""
        many = len(self.positions) > 1
        verb, pronoun = ("are", "them") if many else ("is", "it")
        written = f" in the {self.written_in.name.lower()} arm" if self.written_in is not None else ""
        if self.read_in is None:
            return (
                f"The {self.what} {'were' if many else 'was'} written with other bits{written} than in the "
                "scoring arm, from equal inputs."
            )
        return (
            f"The {self.what} {verb} not what was written: request {self.writer_request} wrote {pronoun}"
            f"{written}, the {self.read_in.name.lower()} arm read other bits."
        )

    def unknown(self) -> str:
        """What is left where another request wrote it, or nobody was seen to."""
        verb = "are" if len(self.positions) > 1 else "is"
        if self.writer_request is not None and self.written_in is not None:
            return (
                f"The {self.what} {verb} not what the scoring arm wrote. Request {self.writer_request} wrote "
                f"there in the {self.written_in.name.lower()} arm: whether that write is wrong or inherits a "
                "difference shows when that request is located."
            )
        return (
            f"The {self.what} {verb} not what the scoring arm read, and the forward that wrote there was not "
            "captured: another request may have."
        )
