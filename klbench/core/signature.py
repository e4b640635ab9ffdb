"""What the divergences of a run look like: which requests, where in them, how large.

The signature only describes; diagnosis.py concludes. Requests are judged by the path they really went, their
cached tokens, not by the name of the helper. Residues are tested against chance, with the number of moduli
and quantities that were tried counted in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import HelperSummary, divergent

Ints = npt.NDArray[np.int64]
Where = Literal["none", "from_first_token", "constant_offset", "constant_position", "mid_generation", "mixed"]

_TILES = (8, 16, 32, 64, 96, 128, 192, 256, 2048)
_CHANCE = 0.01
"""A residue is striking when chance would make one like it in fewer than one of a hundred runs."""
_FIRST_OFFSETS = 1
"""Token 0 comes from a prefill in both arms, token 1 is the first that decode computed."""
_FEW_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Residue:
    """All dirty requests have `quantity` mod `modulus` == `residue`; `chance` counts in all tries."""

    quantity: str
    modulus: int
    residue: int
    requests: int
    chance: float

    @property
    def sentence(self) -> str:
        return (
            f"all {self.requests} divergent requests have {self.quantity} = {self.residue} mod {self.modulus}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One helper's divergences, split by path: `cold_*` requests restored nothing, `hit_*` a prefix."""

    helper: str
    cold: int
    cold_dirty: int
    hit: int
    hit_dirty: int
    where: Where
    contiguous_fraction: float
    """Part of the tokens from the first divergence on that diverge, over the dirty requests."""
    before_decode: int
    """Dirty requests whose first generated token, computed by a prefill in both arms, already differs."""
    first_offset: tuple[int, int] | None
    """Smallest and largest offset of a first divergence."""
    first_position: tuple[int, int] | None
    median_abs_nats: float
    """Median difference of the divergent tokens."""
    max_abs_nats: float
    residues: tuple[Residue, ...]

    @property
    def dirty(self) -> int:
        return self.cold_dirty + self.hit_dirty


def read_signature(
    columns: HelperColumns, summary: HelperSummary, *, moduli: Mapping[str, int] | None = None
) -> Signature:
    """The signature of one helper. `moduli` are the server's own: page, chunk, window in tokens."""
    compared = ~columns.dropped & (np.diff(columns.start) > 0)
    dirty = summary.divergent_tokens > 0
    hit = summary.hit
    offsets = summary.first_offset[dirty]
    positions = columns.prompt_len[dirty] + offsets
    tokens = divergent(columns)
    with np.errstate(invalid="ignore"):
        difference = np.abs(columns.prefill_nats.astype(np.float64) - columns.decode_nats.astype(np.float64))
    sizes = difference[tokens & np.isfinite(difference)]
    after = np.diff(columns.start)[dirty] - offsets
    return Signature(
        helper=columns.helper,
        cold=int(np.count_nonzero(compared & ~hit)),
        cold_dirty=int(np.count_nonzero(dirty & ~hit)),
        hit=int(np.count_nonzero(compared & hit)),
        hit_dirty=int(np.count_nonzero(dirty & hit)),
        where=_where(offsets, positions, columns.prompt_len[dirty]),
        contiguous_fraction=float(summary.divergent_tokens[dirty].sum() / after.sum()) if len(after) else 0.0,
        before_decode=int(np.count_nonzero(offsets == 0)),
        first_offset=_range(offsets),
        first_position=_range(positions),
        median_abs_nats=float(np.median(sizes)) if len(sizes) else 0.0,
        max_abs_nats=float(sizes.max()) if len(sizes) else 0.0,
        residues=striking_residues(columns, summary, moduli or {}),
    )


def _range(values: Ints) -> tuple[int, int] | None:
    return (int(values.min()), int(values.max())) if len(values) else None


def _where(offsets: Ints, positions: Ints, prompt_len: Ints) -> Where:
    if not len(offsets):
        return "none"
    if int(offsets.max()) <= _FIRST_OFFSETS:
        return "from_first_token"
    several = len(offsets) >= _FEW_REQUESTS and len(np.unique(prompt_len)) >= _FEW_REQUESTS
    if several and len(np.unique(offsets)) == 1:
        return "constant_offset"
    if several and len(np.unique(positions)) == 1:
        return "constant_position"
    return "mid_generation" if int(offsets.min()) > _FIRST_OFFSETS else "mixed"


def striking_residues(
    columns: HelperColumns, summary: HelperSummary, moduli: Mapping[str, int]
) -> tuple[Residue, ...]:
    """Residues that separate dirty requests from clean ones, or that first divergences share; best first.

    For lengths: the chance that the dirty requests all fall among those with the residue (hypergeometric).
    For the row of the first divergence: that so many independent rows agree. Both times everything tried.
    """
    dirty = summary.divergent_tokens > 0
    compared = ~columns.dropped & (np.diff(columns.start) > 0)
    count = int(np.count_nonzero(dirty))
    tried_moduli = sorted({m for m in (*moduli.values(), *_TILES) if m > 1})
    if count < _FEW_REQUESTS:
        return ()
    rows = columns.prompt_len + summary.first_offset - 1
    lengths: Sequence[tuple[str, Ints]] = (
        ("prompt_len", columns.prompt_len),
        ("cached_tokens", columns.cached_generation),
    )
    tries = (len(lengths) + 1) * sum(tried_moduli)
    found = []
    for modulus in tried_moduli:
        for quantity, values in lengths:
            residues = np.unique(values[dirty] % modulus)
            if len(residues) != 1:
                continue
            same = int(np.count_nonzero(compared & (values % modulus == residues[0])))
            chance = math.comb(same, count) / math.comb(int(np.count_nonzero(compared)), count)
            found.append(Residue(quantity, modulus, int(residues[0]), count, min(1.0, chance * tries)))
        residues = np.unique(rows[dirty] % modulus)
        # At one common offset the row says no more than the prompt's length did.
        if len(residues) == 1 and len(np.unique(summary.first_offset[dirty])) > 1:
            chance = float(modulus) ** (1 - count)
            found.append(
                Residue("first divergent row", modulus, int(residues[0]), count, min(1.0, chance * tries))
            )
    return tuple(sorted((r for r in found if r.chance < _CHANCE), key=lambda r: (r.chance, -r.modulus)))
