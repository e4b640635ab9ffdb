"""The experiment `pad`: predict which requests diverge from a residue, pad all prompts to it, and see.

    target = parse_target("cached_tokens%8=3")
    pads = pads_to(columns, target, target.residue, page_size=1, longest=4096)     # [N] tokens to append
    read_pad(target, beside, padded_in, padded_out)

The prediction is made before anything is run, so a residue that only looked striking can be refuted. A
request that did not reach its residue (its cached tokens came out otherwise) is left out of the count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.experiments import NOT_COMPARABLE, PARTLY, PREDICTED, REFUTED
from klbench.core.kl import HelperSummary, summarise
from klbench.core.passes import Outcome
from klbench.core.residue_table import QUANTITIES, quantities
from klbench.core.residues import striking_residues

Ints = npt.NDArray[np.int64]

MOST_MODULUS = 1 << 16
_TARGET = re.compile(r"(cached_tokens|prompt_len|total_len)%([0-9]{1,6})=([0-9]{1,6})")
UNREACHABLE = -1


@dataclass(frozen=True, slots=True)
class PadTarget:
    """The residue whose requests are expected to diverge, or with `of_clean` to be clean."""

    quantity: str
    modulus: int
    residue: int
    of_clean: bool = False

    @property
    def words(self) -> str:
        return f"{QUANTITIES[self.quantity]} = {self.residue} mod {self.modulus}"

    def prediction(self, beside: int) -> str:
        """What must be seen if the residue decides; `beside` is the other residue that is tried."""
        inside, outside = ("is clean", "diverges") if self.of_clean else ("diverges", "is clean")
        return (
            f"padded to {self.words} every request {inside}; "
            f"padded to {beside} mod {self.modulus} every request {outside}"
        )


def parse_target(text: str) -> PadTarget:
    """`cached_tokens%8=3`. Raises ValueError."""
    found = _TARGET.fullmatch(text)
    if found is None:
        raise ValueError("a residue is written as cached_tokens%8=3, prompt_len%64=0 or total_len%16=5")
    modulus, residue = int(found[2]), int(found[3])
    if not 2 <= modulus <= MOST_MODULUS or residue >= modulus:
        raise ValueError(f"the modulus lies between 2 and {MOST_MODULUS}, and the rest below it")
    return PadTarget(found[1], modulus, residue)


def striking_target(
    columns: HelperColumns, summary: HelperSummary, server: Mapping[str, Any]
) -> PadTarget | None:
    """The most striking residue of a length, None where none is."""
    for residue in striking_residues(columns, summary, server):
        if residue.quantity in quantities(columns) and residue.modulus <= MOST_MODULUS:
            return PadTarget(residue.quantity, residue.modulus, residue.residue, residue.of_clean)
    return None


def residue_beside(columns: HelperColumns, summary: HelperSummary, target: PadTarget) -> int:
    """Another residue, where the opposite is expected: the one that held most requests of the other kind and
    none of this one; the next one where there is none."""
    dirty = (summary.divergent_tokens > 0) != target.of_clean
    compared = columns.requests_compared
    residues = quantities(columns)[target.quantity] % target.modulus
    classes = [int(rest) for rest in np.unique(residues[compared]) if rest != target.residue]
    opposite = {
        rest: int(np.count_nonzero((residues == rest) & compared))
        for rest in classes
        if not (dirty & compared & (residues == rest)).any()
    }
    if not opposite:
        return (target.residue + 1) % target.modulus
    return max(opposite, key=lambda rest: (opposite[rest], -rest))


def pads_to(
    columns: HelperColumns, target: PadTarget, residue: int, *, page_size: int, longest: int | None
) -> Ints:
    """[N] how many tokens each prompt lacks until its quantity is `residue`; UNREACHABLE where none does it.

    Cached tokens grow by whole pages. `longest` is the most tokens that a prompt may have.
    """
    modulus, page = target.modulus, max(page_size, 1)
    if target.quantity != "cached_tokens":
        pads: Ints = (residue - quantities(columns)[target.quantity]) % modulus
    else:
        cached = columns.cached_generation
        # Tokens of the last page that were not restored, but for the one that is always computed.
        slack = np.clip(columns.prompt_len - 1 - cached, 0, page - 1)
        steps = np.arange(modulus)
        reached = (cached[:, None] + page * steps) % modulus == residue
        pads = np.where(reached.any(axis=1), page * reached.argmax(axis=1) - slack, UNREACHABLE)
        pads = np.where((pads < 0) & reached[:, 0], 0, pads)
        pads = np.where(columns.cached_generation > 0, pads, UNREACHABLE)
    if longest is not None:
        pads = np.where(columns.prompt_len + pads <= longest, pads, UNREACHABLE)
    return pads.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One padded pass: requests that reached the residue, and how many of them diverge."""

    reached: int
    divergent: int


def _seen(columns: HelperColumns, target: PadTarget, residue: int, padded: npt.NDArray[np.bool_]) -> _Seen:
    compared = columns.requests_compared & padded
    there = compared & (quantities(columns)[target.quantity] % target.modulus == residue)
    dirty = summarise(columns).divergent_tokens > 0
    return _Seen(int(np.count_nonzero(there)), int(np.count_nonzero(there & dirty)))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedPass:
    """A pass over padded prompts: `padded` [N] are the requests that could be padded to `residue`."""

    columns: HelperColumns
    residue: int
    padded: npt.NDArray[np.bool_]


def read_pad(target: PadTarget, inside: PaddedPass, beside: PaddedPass) -> Outcome:
    """The outcome of `pad`: did all requests follow the prediction?"""
    one = _seen(inside.columns, target, inside.residue, inside.padded)
    other = _seen(beside.columns, target, beside.residue, beside.padded)
    values: dict[str, Any] = {
        "quantity": target.quantity,
        "modulus": target.modulus,
        "residue": target.residue,
        "beside": beside.residue,
        "prediction": target.prediction(beside.residue),
        "reached": one.reached,
        "divergent": one.divergent,
        "reached_beside": other.reached,
        "divergent_beside": other.divergent,
    }
    if not one.reached or not other.reached:
        text = f"no request could be padded to {target.words} and to {beside.residue} mod {target.modulus}"
        return Outcome("pad", NOT_COMPARABLE, text, values)
    said = (
        f"padded to {target.words} {one.divergent} of {one.reached} requests diverge, padded to "
        f"{beside.residue} mod {target.modulus} {other.divergent} of {other.reached}"
    )
    # As shares of what was predicted to diverge and to be clean.
    dirty, clean = (other, one) if target.of_clean else (one, other)
    if dirty.divergent == dirty.reached and not clean.divergent:
        return Outcome("pad", PREDICTED, f"{said}: as predicted", values)
    if dirty.divergent * clean.reached > clean.divergent * dirty.reached:
        return Outcome("pad", PARTLY, f"{said}: the prediction holds in part", values)
    return Outcome("pad", REFUTED, f"{said}: the prediction is refuted", values)
