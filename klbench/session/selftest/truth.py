"""What must be said of planted faults in one measured run, by the catalogue's rules.

The first row of an origin follows from how the run's forwards were made (faults_truth.FIRST_POSITIONS): its
prompts, chunks and restored prefixes decide where two arms come to lie on different sides of a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from klbench.core.accuracy import First, Origin, Truth
from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.kl import divergent
from klbench.engine.compositions import Composition, Part
from klbench.insitu.faults_catalogue import PAIR_CATALOGUE, ArmedFault, parse_faults
from klbench.zoo import SLIDING_WINDOW

_Placed = tuple[str, Part, Composition]
"""The arm, the request's rows and the forward they are in."""


def truth_of(
    fault: str,
    located: tuple[HelperName, int] | None,
    columns: Mapping[HelperName, HelperColumns],
    forwards: Sequence[Composition],
    number: int,
) -> Truth:
    """The truth about `fault` (spelled as in the catalogue) in a run with these columns.

    `located` is the helper and the request that were traced, `number` that helper's pass and `forwards` what
    it was made of.
    """
    armed = parse_faults(fault)
    pair = PAIR_CATALOGUE.get(fault)
    hidden = pair is not None and pair.masked
    origins = []
    for planted in armed[: 1 if hidden else None]:
        first = First()
        if located is not None:
            helper, request = located
            first = first_position(planted, columns[helper], request, forwards, number)
        origins.append(
            Origin(
                planted.spelled,
                planted.module,
                planted.parameters["layer"] if "{layer}" in planted.fault.truth.module else None,
                planted.fault.truth.kinds,
                first,
            )
        )
    return Truth(
        conditions=frozenset(planted.fault.truth.condition for planted in armed),
        dirty=dirty_helpers(armed, columns),
        origins=tuple(origins),
        masked=tuple(planted.module for planted in armed[1:]) if hidden else (),
        requests=touched(armed, forwards, number) if located is not None else None,
        by_chance=any(_by_chance(planted) for planted in armed),
    )


def _by_chance(planted: ArmedFault) -> bool:
    """Whether it acts at random, or where the server chooses: it retracts whichever request it likes."""
    return planted.fault.truth.condition == "race" or "retraction" in planted.fault.truth.needs


def touched(
    armed: Sequence[ArmedFault], forwards: Sequence[Composition], number: int
) -> frozenset[int] | None:
    """The requests of pass `number` whose restored prefix the faults spoil; None where one does not choose.

    A spoilt row is its slot's: prompts with a common prefix must not be judged by this.
    """
    if not all({"modulus", "spared"} <= planted.parameters.keys() for planted in armed):
        return None
    found = set()
    for forward in forwards:
        for place, part in enumerate(forward.parts):
            if part.rid is None or part.rid.number != number or part.phase != "restored":
                continue
            for planted in armed:
                chosen = (
                    part.prefix_len % max(1, planted.parameters["modulus"]) == planted.parameters["residue"]
                )
                if chosen and place >= planted.parameters["spared"] and part.prefix_len > 1:
                    found.add(part.rid.request)
    return frozenset(found)


def dirty_helpers(armed: Sequence[ArmedFault], columns: Mapping[HelperName, HelperColumns]) -> frozenset[str]:
    """The helpers that must diverge; all others must be at exactly zero."""
    dirty = {helper for planted in armed for helper in planted.fault.truth.dirty_helpers}
    match = columns.get("match")
    if match is not None and match.cached_generation.any():
        # Prompts with a common prefix restore it even inside match, where they do not share a forward.
        dirty = set(HELPERS)
    return frozenset(dirty)


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
        return First(_one_sided(parts, lambda _, forward, __: forward.rows >= parameters["rows"]))
    if rule == "tile":
        half = parameters["tile"] // 2
        return First(
            _one_sided(parts, lambda part, *_: part.phase != "decode" and part.rows // half % 2 == 1)
        )
    if rule == "scored":
        return First(prompt - 1)
    if rule == "decode":
        # A window of so many rows is full at the last of them: the next row is the first that crosses it.
        crossing = SLIDING_WINDOW if "window" in armed.fault.truth.needs else 0
        least = parameters.get("block", crossing)
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
        # A cold request shares the rows that another's restore spoilt: where it reads them has no rule.
        return First(cached or None)
    if rule == "padded":
        threshold, pad = parameters["rows"], parameters["pad"]
        return First(_one_sided(parts, lambda _, c, __: c.rows < threshold and c.rows % pad != 0))
    if rule == "chunk":
        return First(_cut_on_one_side(parts))
    if rule == "resumed":
        # What the cache still had of a retracted request is restored, not computed again.
        again = [
            position
            for _, part, _ in parts
            if part.phase == "resumed"
            and (position := part.seq_len - 1 - parameters["back"]) >= part.first_position
        ]
        return First(min(again, default=None))
    if rule == "split":
        return First(_one_sided(parts, _split))
    if rule == "divergent":
        return First(_first_divergent_row(columns, request))
    return First(None)


def _split(part: Part, _: Composition, position: int) -> int | None:
    """Where the row's keys are split (faults_attention.plant_split); None for one sum over all of them."""
    middle = part.prefix_len + part.rows // 2
    return middle if part.rows > 1 and position >= middle else None


def _first_divergent_row(columns: HelperColumns, request: int) -> int | None:
    """The row of the request's first token whose two logprobs differ."""
    tokens = columns.tokens_of(request)
    differing = np.flatnonzero(divergent(columns)[tokens])
    return int(columns.prompt_len[request]) - 1 + int(differing[0]) if len(differing) else None


def _cut_on_one_side(parts: Sequence[_Placed]) -> int | None:
    """The first position at which a later chunk begins in one arm and not in the other."""
    cuts: dict[bool, set[int]] = {True: set(), False: set()}
    for arm, part, _ in parts:
        if part.phase == "chunk":
            cuts[arm == "scoring"].add(part.first_position)
    return min(cuts[True] ^ cuts[False], default=None)


def _one_sided(parts: Sequence[_Placed], acts: Callable[[Part, Composition, int], object]) -> int | None:
    """The first position whose row the fault treats otherwise in one arm than in the other, by what `acts`
    says of it: whether it acts on the row, or how."""
    sides: dict[str, dict[int, set[object]]] = {}
    for arm, part, composition in parts:
        positions = sides.setdefault(arm, {})
        for position in range(part.first_position, part.first_position + part.rows):
            positions.setdefault(position, set()).add(acts(part, composition, position))
    scoring: Mapping[int, set[object]] = sides.pop("scoring", {})
    differing = [
        position
        for positions in sides.values()
        for position, side in positions.items()
        if position in scoring and side != scoring[position]
    ]
    return min(differing, default=None)
