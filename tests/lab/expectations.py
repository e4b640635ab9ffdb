"""Where a fault's origin must begin in one captured pass, by the rules of faults_truth.FIRST_POSITIONS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from klbench.core.columns import HelperColumns
from klbench.engine.compositions import Composition, Part
from klbench.insitu.faults_catalogue import ArmedFault

SLIDING_WINDOW = 64

_Placed = tuple[str, Part, Composition]
"""The arm, the request's rows and the forward they are in."""


@dataclass(frozen=True)
class First:
    """The first row position that is right: exactly `position`, or none before it; None: any."""

    position: int | None
    exactly: bool = True

    def allows(self, found: int) -> bool:
        if self.position is None:
            return True
        return found == self.position if self.exactly else found >= self.position

    def __str__(self) -> str:
        return "any" if self.position is None else f"{'' if self.exactly else '>='}{self.position}"


def first_position(
    armed: ArmedFault, columns: HelperColumns, request: int, passed: Sequence[Composition], number: int
) -> First:
    """What the fault's rule says of `request` in pass `number`, whose forwards are `passed`."""
    rule, parameters = armed.fault.truth.first, armed.parameters
    prompt = int(columns.prompt_len[request])
    parts = [
        (rid.arm, part, composition)
        for composition in passed
        for part in composition.parts
        if (rid := part.rid) is not None and (rid.number, rid.request) == (number, request)
    ]
    if rule == "rows":
        return First(_one_sided(parts, lambda _, composition: composition.rows >= parameters["rows"]))
    if rule == "tile":
        half = parameters["tile"] // 2
        return First(_one_sided(parts, lambda part, _: part.phase != "decode" and part.rows // half % 2 == 1))
    if rule == "scored":
        generating = [part for arm, part, _ in parts if arm != "scoring"]
        return First(min(part.first_position + part.rows - 1 for part in generating))
    if rule == "decode":
        least = parameters.get("block", SLIDING_WINDOW + 1 if "window" in armed.fault.name else 0)
        return First(max(prompt, least))
    if rule == "after":
        return First(prompt + parameters["after"])
    if rule == "step":
        return First(prompt + parameters["step"] - 1)
    if rule == "interval":
        interval = parameters["interval"]
        return First(-(-prompt // interval) * interval)
    if rule == "cached":
        cached = int(columns.cached_generation[request])
        # A cold request shares the rows that another's restore spoilt: its later chunks read them.
        return First(cached) if cached else First(1, exactly=False)
    if rule == "split":
        return First(prompt // 2, exactly=False)
    return First(None)


def _one_sided(parts: Sequence[_Placed], acts: Callable[[Part, Composition], bool]) -> int | None:
    """The first position of which one arm has a row that the fault acted on and the other has not."""
    sides: dict[str, dict[int, set[bool]]] = {}
    for arm, part, composition in parts:
        positions = sides.setdefault(arm, {})
        for position in range(part.first_position, part.first_position + part.rows):
            positions.setdefault(position, set()).add(acts(part, composition))
    scoring: Mapping[int, set[bool]] = sides.pop("scoring", {})
    differing = [
        position
        for positions in sides.values()
        for position, side in positions.items()
        if position in scoring and side != scoring[position]
    ]
    return min(differing, default=None)
