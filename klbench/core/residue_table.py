"""Every modulus against every length: where do divergent requests gather, and is it striking?

    quantity        mod  is            rest  divergent there  clean there  by chance
    cached tokens     8                   3            8 / 8       0 / 24      1e-05  ◀
    prompt length    64  page size       17            3 / 8       4 / 24          –

One line for each modulus and quantity: the class that holds the largest part of the divergent requests. What
is striking, and at which odds, is residues.py's judgement, which allows for all that was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import HelperSummary
from klbench.core.residues import Residue, moduli, striking_residues

QUANTITIES: dict[str, str] = {
    "cached_tokens": "cached tokens",
    "prompt_len": "prompt length",
    "total_len": "total length",
    "first divergent row": "first divergent row",
}
"""What residues are taken of, with the words for it."""


@dataclass(frozen=True, slots=True)
class ResidueLine:
    """One class of one modulus. `clean_there` is None for rows, which clean requests do not have.

    `chance` is None where it is not striking. `of_clean`: it is the clean requests that gather there.
    """

    quantity: str
    modulus: int
    setting: str | None
    residue: int
    divergent_there: int
    divergent: int
    clean_there: int | None
    clean: int
    chance: float | None = None
    of_clean: bool = False

    @property
    def striking(self) -> bool:
        return self.chance is not None


def quantities(columns: HelperColumns) -> dict[str, npt.NDArray[np.int64]]:
    """Each request's [N] lengths in tokens, but for its rows."""
    return {
        "cached_tokens": columns.cached_generation,
        "prompt_len": columns.prompt_len,
        "total_len": columns.prompt_len + columns.output_len,
    }


def residue_table(
    columns: HelperColumns, summary: HelperSummary, server: Mapping[str, Any]
) -> tuple[ResidueLine, ...]:
    """The lines, striking ones first with the most striking on top, then by quantity and modulus.

    Empty where no request diverges. `server` is the object of klbench.run/1: its settings are moduli.
    """
    compared = columns.requests_compared
    dirty = (summary.divergent_tokens > 0)[compared]
    if not dirty.any():
        return ()
    lengths = {name: values[compared] for name, values in quantities(columns).items()}
    rows = (columns.prompt_len + summary.first_offset - 1)[compared][dirty]
    striking = striking_residues(columns, summary, server)
    lines: list[ResidueLine] = []
    for modulus, setting in moduli(server).items():
        for quantity in QUANTITIES:
            known = _best(striking, quantity, modulus)
            if quantity == "first divergent row":
                lines.append(_of_rows(rows, modulus, setting, int(dirty.size - dirty.sum()), known))
            elif quantity != "cached_tokens" or lengths[quantity].any():
                lines.append(
                    _of_lengths(quantity, lengths[quantity] % modulus, dirty, modulus, setting, known)
                )
    merit = {(r.quantity, r.modulus): place for place, r in reversed(list(enumerate(striking)))}
    order = list(QUANTITIES)
    return tuple(
        sorted(
            lines,
            key=lambda line: (
                merit.get((line.quantity, line.modulus), len(striking)),
                order.index(line.quantity),
                line.modulus,
            ),
        )
    )


def _best(striking: Sequence[Residue], quantity: str, modulus: int) -> Residue | None:
    return next((r for r in striking if (r.quantity, r.modulus) == (quantity, modulus)), None)


def _of_lengths(
    quantity: str,
    residues: npt.NDArray[np.int64],
    dirty: npt.NDArray[np.bool_],
    modulus: int,
    setting: str | None,
    known: Residue | None,
) -> ResidueLine:
    """The striking class, else the one with the most divergent and then the fewest clean requests."""
    if known is not None:
        residue = known.residue
    else:
        classes, place = np.unique(residues, return_inverse=True)
        inside = np.bincount(place, weights=dirty, minlength=len(classes))
        outside = np.bincount(place, weights=~dirty, minlength=len(classes))
        residue = int(classes[np.lexsort((classes, outside, -inside))[0]])
    there = residues == residue
    return ResidueLine(
        quantity=quantity,
        modulus=modulus,
        setting=setting,
        residue=residue,
        divergent_there=int(np.count_nonzero(there & dirty)),
        divergent=int(np.count_nonzero(dirty)),
        clean_there=int(np.count_nonzero(there & ~dirty)),
        clean=int(np.count_nonzero(~dirty)),
        chance=known.chance if known is not None else None,
        of_clean=known.of_clean if known is not None else False,
    )


def _of_rows(
    rows: npt.NDArray[np.int64], modulus: int, setting: str | None, clean: int, known: Residue | None
) -> ResidueLine:
    classes, counts = np.unique(rows % modulus, return_counts=True)
    most = int(counts.argmax())
    return ResidueLine(
        quantity="first divergent row",
        modulus=modulus,
        setting=setting,
        residue=int(classes[most]),
        divergent_there=int(counts[most]),
        divergent=len(rows),
        clean_there=None,
        clean=clean,
        chance=known.chance if known is not None else None,
    )
