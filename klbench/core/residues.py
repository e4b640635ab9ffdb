"""What tells the divergent requests of a run from the clean ones: residues, lengths, places in the batch.

    "all 8 divergent requests and no other have cached tokens = 3 mod 8"
    "all divergent requests and no other are longer than 512 tokens (a prefill chunk)"

Each is an exact test (hypergeometric) of the question "would chance separate them so?", multiplied by the
number of questions asked, so that trying many moduli makes nothing striking. Quantities are counted in
tokens, but for the request's place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import HelperSummary

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

KV_TILES = (64, 96, 128, 192, 256)
SMALL_TILES = (8, 16, 32)
LOGPROB_CHUNK = 2048
CHANCE = 0.01
"""Striking: chance would make one like it in fewer than one of a hundred runs."""
FEW_REQUESTS = 3
_LARGEST_CLASSES = 64
_WORDS = {
    "prompt_len": "prompt length",
    "cached_tokens": "cached tokens",
    "total_len": "total length",
    "extend_rows": "prompt tokens that were not cached",
    "first divergent row": "first divergent row",
    "place": "place in the batch",
}


@dataclass(frozen=True, slots=True)
class Residue:
    """Divergent requests gather at `quantity` mod `modulus` == `residue`, or (`of_clean`) the clean ones do.

    `exclusive`: no divergent request lies elsewhere. `complete`: no clean one lies there. `chance` counts in
    all tries.
    """

    quantity: str
    modulus: int
    residue: int
    requests: int
    chance: float
    exclusive: bool = True
    complete: bool = False
    of_clean: bool = False
    setting: str | None = None
    """The server's setting that this modulus is, if it is one."""

    @property
    def sentence(self) -> str:
        if self.quantity == "first divergent row":
            who = f"all {self.requests} divergent requests have"
        elif self.of_clean:
            who = (
                f"{'all' if self.exclusive else 'most'} clean requests{' and no other' * self.complete} have"
            )
        else:
            who = f"{'all' if self.exclusive else 'most'} {self.requests} divergent requests"
            who += f"{' and no other' * self.complete} have"
        named = f" (the server's {self.setting.replace('_', ' ')})" if self.setting else ""
        return f"{who} {_WORDS[self.quantity]} = {self.residue} mod {self.modulus}{named}"

    @property
    def values(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "modulus": self.modulus,
            "residue": self.residue,
            "chance": self.chance,
            "exclusive": self.exclusive,
            "complete": self.complete,
            "of_clean": self.of_clean,
            "setting": self.setting,
        }


@dataclass(frozen=True, slots=True)
class Split:
    """A limit of one quantity parts divergent from clean requests completely: `above` or below it."""

    quantity: str
    above: bool
    highest_below: int
    lowest_above: int
    requests: int
    chance: float
    boundary: tuple[str, int] | None = None
    """A setting of the server that lies between the two, with its value."""

    @property
    def sentence(self) -> str:
        side = f"at least {self.lowest_above}" if self.above else f"at most {self.highest_below}"
        said = f"all {self.requests} divergent requests and no other have {_WORDS[self.quantity]} {side}"
        if self.boundary is not None:
            said += f"; the server's {self.boundary[0].replace('_', ' ')} is {self.boundary[1]}"
        return said

    @property
    def values(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "above": self.above,
            "highest_below": self.highest_below,
            "lowest_above": self.lowest_above,
            "chance": self.chance,
            "boundary": None if self.boundary is None else list(self.boundary),
        }


@dataclass(frozen=True, slots=True)
class Place:
    """How the divergent requests lie in the list: `first_spared` (all but one), `tail`, `head`, `block`."""

    kind: str
    first: int
    last: int
    chance: float

    @property
    def sentence(self) -> str:
        match self.kind:
            case "first_spared":
                return "all requests but the first of the batch diverge"
            case "tail":
                return f"the requests from place {self.first} on diverge, and no earlier one"
            case "head":
                return f"the requests up to place {self.last} diverge, and no later one"
        return f"the requests at places {self.first} to {self.last} diverge, and no other"


def moduli(server: Mapping[str, Any]) -> dict[int, str | None]:
    """Each modulus to try, with the server's setting that it is (None for tiles and chunks of kernels)."""
    found: dict[int, str | None] = dict.fromkeys((*SMALL_TILES, *KV_TILES, LOGPROB_CHUNK))
    for name in (
        "conv_width",
        "checkpoint_interval",
        "sliding_window",
        "chunked_prefill_size",
        "page_size",
    ):
        value = server.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found[value] = name
    return dict(sorted(found.items()))


def striking_residues(
    columns: HelperColumns, summary: HelperSummary, server: Mapping[str, Any]
) -> tuple[Residue, ...]:
    """Residues that part divergent requests from clean ones, or that first divergences share; best first."""
    compared = columns.requests_compared
    dirty = (summary.divergent_tokens > 0)[compared]
    count = int(np.count_nonzero(dirty))
    if count < FEW_REQUESTS:
        return ()
    tried = moduli(server)
    quantities = _quantities(columns, compared)
    rows = (columns.prompt_len + summary.first_offset - 1)[compared][dirty]
    offsets = summary.first_offset[compared][dirty]
    found: list[Residue] = []
    tries = 0
    for modulus, setting in tried.items():
        for quantity in ("prompt_len", "cached_tokens", "total_len"):
            values = quantities[quantity]
            if len(np.unique(values)) < FEW_REQUESTS:
                continue
            part, asked = _gathered(quantity, values % modulus, dirty, modulus, setting)
            tries += asked
            found += part
        # At one common offset the row says no more than the prompt's length, at one row no more than that.
        tries += modulus
        if len(np.unique(offsets)) > 1 and len(np.unique(rows)) > 1 and len(np.unique(rows % modulus)) == 1:
            chance = float(modulus) ** (1 - count)
            found.append(
                Residue(
                    "first divergent row", modulus, int(rows[0] % modulus), count, chance, setting=setting
                )
            )
    judged = [_corrected(residue, tries) for residue in found]
    best = sorted((r for r in judged if r.chance < CHANCE), key=_merit)
    return tuple(best)


def _merit(residue: Residue) -> tuple[object, ...]:
    """What is likelier first; then what separates completely; then a setting of the server."""
    whole = residue.exclusive and residue.complete
    return (
        not whole,
        round(math.log10(max(residue.chance, 1e-300))),
        residue.setting is None,
        -residue.modulus,
    )


def _corrected(residue: Residue, tries: int) -> Residue:
    return Residue(
        residue.quantity,
        residue.modulus,
        residue.residue,
        residue.requests,
        min(1.0, residue.chance * tries),
        residue.exclusive,
        residue.complete,
        residue.of_clean,
        residue.setting,
    )


def _gathered(
    quantity: str, residues: Ints, dirty: Flags, modulus: int, setting: str | None
) -> tuple[list[Residue], int]:
    """Classes in which divergent, or clean, requests gather; and how many classes were asked about."""
    total, count = len(dirty), int(np.count_nonzero(dirty))
    classes, place = np.unique(residues, return_inverse=True)
    size = np.bincount(place, minlength=len(classes))
    inside = np.bincount(place, weights=dirty, minlength=len(classes)).astype(np.int64)
    found = []
    # The best candidates are the classes that hold the most of either kind.
    order = np.argsort(-np.maximum(inside, size - inside), kind="stable")[:_LARGEST_CLASSES]
    for at in order.tolist():
        n, x = int(size[at]), int(inside[at])
        if 2 * x > count and x >= FEW_REQUESTS:
            chance = _at_least(x, total, count, n)
            if chance < CHANCE:
                found.append(
                    Residue(
                        quantity, modulus, int(classes[at]), x, chance, x == count, x == n, False, setting
                    )
                )
        clean = total - count
        y = n - x
        if 2 * y > clean and y >= FEW_REQUESTS:
            chance = _at_least(y, total, clean, n)
            if chance < CHANCE:
                found.append(
                    Residue(quantity, modulus, int(classes[at]), y, chance, y == clean, y == n, True, setting)
                )
    return found, 2 * len(classes)


def _at_least(x: int, total: int, marked: int, drawn: int) -> float:
    """P(at least x of `marked` among `drawn` of `total`), exactly: the upper hypergeometric tail."""
    highest = min(marked, drawn)
    whole = _log_choose(total, drawn)
    return float(
        sum(
            math.exp(_log_choose(marked, i) + _log_choose(total - marked, drawn - i) - whole)
            for i in range(x, highest + 1)
            if drawn - i <= total - marked
        )
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def striking_splits(
    columns: HelperColumns, summary: HelperSummary, server: Mapping[str, Any]
) -> tuple[Split, ...]:
    """Limits that part divergent from clean requests completely; best first."""
    compared = columns.requests_compared
    dirty = (summary.divergent_tokens > 0)[compared]
    count, total = int(np.count_nonzero(dirty)), len(dirty)
    if not 0 < count < total:
        return ()
    quantities = _quantities(columns, compared)
    tries = 2 * len(quantities)
    chance = min(1.0, tries * math.exp(-_log_choose(total, count)))
    if chance >= CHANCE:
        return ()
    found = []
    for quantity, values in quantities.items():
        for above in (True, False):
            high, low = (dirty, ~dirty) if above else (~dirty, dirty)
            below, over = int(values[low].max()), int(values[high].min())
            if below < over:
                boundary = _boundary(server, quantity, below, over)
                found.append(Split(quantity, above, below, over, count, chance, boundary))
    return tuple(sorted(found, key=lambda s: s.boundary is None))


def _boundary(server: Mapping[str, Any], quantity: str, below: int, above: int) -> tuple[str, int] | None:
    names = ("chunked_prefill_size", "sliding_window", "page_size")[: 1 if quantity == "extend_rows" else 3]
    for name in names:
        value = server.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and below <= value <= above and value > 1:
            return name, value
    return None


def place_in_batch(columns: HelperColumns, summary: HelperSummary) -> Place | None:
    """How the divergent requests lie in the list, where chance would not put them so."""
    compared = columns.requests_compared
    places = np.flatnonzero(compared)
    dirty = (summary.divergent_tokens > 0)[compared]
    count, total = int(np.count_nonzero(dirty)), len(dirty)
    if count < FEW_REQUESTS or count == total:
        return None
    where = np.flatnonzero(dirty)
    first, last = int(where[0]), int(where[-1])
    if last - first + 1 != count:
        return None
    named = int(places[first]), int(places[last])
    if count == total - 1 and first == 1 and total > 2 * FEW_REQUESTS:
        # One question, asked because faults like it are known; chance gives it one run in `total`.
        return Place("first_spared", *named, 1.0 / total)
    starts = total - count + 1
    chance = min(1.0, starts * math.exp(-_log_choose(total, count)))
    if chance >= CHANCE:
        return None
    kind = "tail" if last == total - 1 else "head" if first == 0 else "block"
    return Place(kind, *named, chance)


def _quantities(columns: HelperColumns, compared: Flags) -> dict[str, Ints]:
    """What each compared request is measured by, in tokens."""
    return {
        "prompt_len": columns.prompt_len[compared],
        "cached_tokens": columns.cached_generation[compared],
        "total_len": (columns.prompt_len + columns.output_len)[compared],
        "extend_rows": (columns.prompt_len - columns.cached_generation)[compared],
    }
