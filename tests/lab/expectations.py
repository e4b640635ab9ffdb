"""Where a fault's origin must begin in one captured pass, by the rules of faults_truth.FIRST_POSITIONS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from klbench.core.columns import HelperColumns
from klbench.engine.compositions import Composition
from klbench.insitu.faults_catalogue import ArmedFault

SLIDING_WINDOW = 64


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
    if rule == "rows":
        return First(_other_side(passed, number, request, parameters["rows"]))
    if rule == "scored":
        return First(prompt - 1)
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
        return First(int(columns.cached_generation[request]))
    if rule == "split":
        return First(prompt // 2, exactly=False)
    if rule == "tile":
        half = parameters["tile"] // 2
        odd = {rows // half % 2 for _, rows in _extends(passed, number, request)}
        return First(0 if len(odd) == 2 else None)
    return First(None)


def _extends(passed: Sequence[Composition], number: int, request: int) -> Iterator[tuple[str, int]]:
    for composition in passed:
        for part in composition.parts:
            rid = part.rid
            if rid is not None and (rid.number, rid.request) == (number, request) and part.phase != "decode":
                yield rid.arm, part.rows


def _other_side(passed: Sequence[Composition], number: int, request: int, threshold: int) -> int | None:
    """The first position that one arm computed in a call of `threshold` rows or more, the other not."""
    sides: dict[str, dict[int, set[bool]]] = {}
    for composition in passed:
        for part in composition.parts:
            rid = part.rid
            if rid is None or (rid.number, rid.request) != (number, request):
                continue
            arm: dict[int, set[bool]] = sides.setdefault(rid.arm, {})
            for position in range(part.first_position, part.first_position + part.rows):
                arm.setdefault(position, set()).add(composition.rows >= threshold)
    scoring: Mapping[int, set[bool]] = sides.pop("scoring", {})
    differing = [
        position
        for arm in sides.values()
        for position, side in arm.items()
        if position in scoring and side != scoring[position]
    ]
    return min(differing, default=None)
