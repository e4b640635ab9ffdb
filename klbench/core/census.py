"""Which operators are batch-invariant: what replays with 1, 2, 3, ... rows say, ranked by damage.

An operator is invariant when the bits of a row do not depend on how many rows share its call. The result with
one row is variant 0; the first M with another variant is where the operator changes. Nothing that was not
called again counts as invariant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from klbench.core.trace import layer_of

Status = Literal["invariant", "not_invariant", "not_repeatable", "skipped", "stateful", "error"]
STATUSES: tuple[Status, ...] = (
    "not_invariant",
    "not_repeatable",
    "error",
    "skipped",
    "invariant",
    "stateful",
)


@dataclass(frozen=True, slots=True)
class Damage:
    """The largest difference between the variants of a row, over all outputs and judged rows."""

    ulp_max: int
    differing: int
    elements: int
    not_numbers: int
    pattern: str
    argument: str

    @property
    def size(self) -> tuple[int, int, int]:
        return self.not_numbers, self.ulp_max, self.differing


@dataclass(frozen=True, slots=True)
class OperatorReplay:
    """One call site on one rank, called again with each M of `tried`.

    `variants[judged][m]` numbers the result that a judged row had with `tried[m]` rows; two rows of one list
    are bit-equal if and only if their numbers are.
    """

    module: str
    call: int
    class_name: str
    order: int
    rank: int
    status: Status
    reason: str
    total: int
    """N: all rows of the forward that was replayed."""
    tried: tuple[int, ...]
    judged: tuple[int, ...]
    """Rows of the batch whose results were compared."""
    variants: tuple[tuple[int, ...], ...]
    damage: Damage | None = None

    @property
    def layer(self) -> int | None:
        return layer_of(self.module)

    @property
    def changed(self) -> tuple[int, ...]:
        """Every M with which a judged row has other bits than alone."""
        return tuple(m for place, m in enumerate(self.tried) if any(row[place] for row in self.variants))

    @property
    def first_changed(self) -> int | None:
        """The smallest of them: `replay_M`."""
        return min(self.changed, default=None)

    @property
    def answered(self) -> bool:
        return self.status in ("invariant", "not_invariant")

    def as_dict(self) -> dict[str, Any]:
        """One operator of klbench.census/1."""
        damage = self.damage
        return {
            "module": self.module,
            "call": self.call,
            "layer": self.layer,
            "class": self.class_name,
            "rank": self.rank,
            "status": self.status,
            "reason": self.reason or None,
            "first_M": self.first_changed,
            "changed_M": list(self.changed),
            "tried_M": list(self.tried),
            "judged_rows": list(self.judged),
            "ulp_max": damage.ulp_max if damage else None,
            "differing": damage.differing if damage else None,
            "elements": damage.elements if damage else None,
            "not_numbers": damage.not_numbers if damage else None,
            "pattern": damage.pattern if damage else None,
            "argument": damage.argument if damage else None,
        }


def joined_variants(outputs: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """The variants of a row over all outputs: `outputs[output][judged][m]` to `[judged][m]`."""
    joined: list[tuple[int, ...]] = []
    for judged in zip(*outputs, strict=True):
        known: dict[tuple[int, ...], int] = {}
        joined.append(tuple(known.setdefault(key, len(known)) for key in zip(*judged, strict=True)))
    return tuple(joined)


def by_damage(operators: Iterable[OperatorReplay]) -> list[OperatorReplay]:
    """The worst first: what changes, by the largest difference, then what could not be judged."""

    def key(operator: OperatorReplay) -> tuple[int, tuple[int, int, int], int, int]:
        worst = operator.damage.size if operator.damage else (0, 0, 0)
        size = (-worst[0], -worst[1], -worst[2])
        return STATUSES.index(operator.status), size, operator.order, operator.rank

    return sorted(operators, key=key)


def census_body(operators: Sequence[OperatorReplay]) -> dict[str, Any]:
    """The body of klbench.census/1."""
    ordered = by_damage(operators)
    return {
        "rows": max((operator.total for operator in operators), default=0),
        "tried_M": sorted({m for operator in operators for m in operator.tried}),
        "summary": {status: sum(operator.status == status for operator in operators) for status in STATUSES},
        "operators": [operator.as_dict() for operator in ordered],
    }


def row_counts(limit: int) -> list[int]:
    """The M to try up to `limit`: 1, 2, 3 and the powers of two."""
    powers = [1 << power for power in range(max(limit, 1).bit_length())]
    return sorted(m for m in {3, *powers} if m <= max(limit, 1))


def largest_prime(limit: int) -> int:
    """The largest prime up to `limit`, at least 2: so many rows cannot be mistaken for another dimension."""
    for number in range(max(limit, 2), 2, -1):
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            return number
    return 2
