"""What the divergences of a run look like: which requests, where in them, how large.

    signatures = [read_signature(columns, summarise(columns), server) for columns in run]
    cold, hit = read_paths(signatures)

The signature only describes; hypotheses.py explains. Requests are judged by the path they really went, their
cached tokens, not by the name of the helper: a *cold* request restored nothing before it generated, a *hit*
restored a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import HelperSummary, divergent
from klbench.core.residues import (
    FEW_REQUESTS,
    Place,
    Residue,
    Split,
    place_in_batch,
    striking_residues,
    striking_splits,
)
from klbench.core.sharing import Sharing, read_sharing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Where = Literal["none", "from_first_token", "constant_offset", "constant_position", "mid_generation", "mixed"]
Shape = Literal["none", "contiguous", "patchy", "scattered"]

_FIRST_OFFSETS = 1
"""Token 0 comes from a prefill in both arms, token 1 is the first that decode computed."""
_CONTIGUOUS, _SCATTERED = 0.8, 0.2
"""Parts of the tokens from the first divergence on that diverge."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What of each compared request is needed here; all arrays are [n]. `first_offset` -1: no divergence."""

    prompt_len: Ints
    cached: Ints
    output_len: Ints
    first_offset: Ints
    divergent: Ints
    tokens: Ints
    median_abs: Floats
    """Median |difference| in nats of the request's divergent tokens with finite logprobs; 0 without any."""
    max_abs: Floats
    lost: Flags
    """Whether its first token was not compared."""

    @property
    def dirty(self) -> Flags:
        result: Flags = self.divergent > 0
        return result

    def part(self, flags: Flags) -> Requests:
        return Requests(*(getattr(self, name)[flags] for name in Requests.__slots__))

    @staticmethod
    def joined(parts: Sequence[Requests]) -> Requests:
        return Requests(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in Requests.__slots__)
        )


@dataclass(frozen=True, slots=True)
class Readings:
    """The first divergent token read three ways, as (smallest, largest) over the divergent requests.

    Constant `position`: the edge of a tile, a window or a split. Constant `offset`, from the prompt's end:
    something after so many decode steps. Constant `from_cached`, from the end of the restored prefix: the
    restore. `from_cached` is None where a divergent request restored nothing.
    """

    position: tuple[int, int]
    offset: tuple[int, int]
    from_cached: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class PathReading:
    """The requests that went one way: how many, how many diverge, where and how much."""

    requests: int
    dirty: int
    where: Where
    shape: Shape
    readings: Readings | None
    edge: int | None
    """The token position at which all divergences begin, or would if the prompt did not reach past it."""
    before_decode: int
    """Divergent requests whose first generated token, computed by a prefill in both arms, already differs."""
    first_lost: int
    """Divergent requests whose first generated token was not compared."""
    contiguous_fraction: float
    median_abs_nats: float
    """Median over the divergent requests of the median difference of their divergent tokens."""
    max_abs_nats: float
    extend_rows: tuple[int, int] | None
    """Prompt tokens that the generation arm computed, over all requests of this path."""

    @property
    def all_from_first(self) -> bool:
        """Whether each divergent request differs at its first generated token, where that was compared."""
        return self.before_decode > 0 and self.before_decode + self.first_lost >= self.dirty


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One helper's divergences."""

    helper: str
    requests: Requests
    cold: PathReading
    hit: PathReading
    whole: PathReading
    scoring_hits: int
    """Compared requests whose scoring arm restored a prefix: there the two arms may hide the same defect."""
    residues: tuple[Residue, ...]
    splits: tuple[Split, ...]
    place: Place | None
    sharing: Sharing
    nan_tokens: int


def read_signature(columns: HelperColumns, summary: HelperSummary, server: Mapping[str, Any]) -> Signature:
    """The signature of one helper. `server` is the object of klbench.run/1: its settings are moduli."""
    requests = _requests(columns, summary)
    hit = requests.cached > 0
    compared = columns.requests_compared
    return Signature(
        helper=columns.helper,
        requests=requests,
        cold=read_path(requests.part(~hit)),
        hit=read_path(requests.part(hit)),
        whole=read_path(requests),
        scoring_hits=int(np.count_nonzero(columns.cached_scoring[compared] > 0)),
        residues=striking_residues(columns, summary, server),
        splits=striking_splits(columns, summary, server),
        place=place_in_batch(columns, summary),
        sharing=read_sharing(columns),
        nan_tokens=summary.nan_count,
    )


def read_paths(signatures: Sequence[Signature]) -> tuple[PathReading, PathReading]:
    """All cold requests and all hits of a run, whatever helper they belong to."""
    if not signatures:
        nothing = read_path(_NO_REQUESTS)
        return nothing, nothing
    requests = Requests.joined([signature.requests for signature in signatures])
    hit = requests.cached > 0
    return read_path(requests.part(~hit)), read_path(requests.part(hit))


def read_path(requests: Requests) -> PathReading:
    """The reading of some requests."""
    dirty = requests.part(requests.dirty)
    count = len(dirty.tokens)
    edge = _edge(requests)
    after = int((dirty.tokens - dirty.first_offset).sum())
    fraction = float(dirty.divergent.sum() / after) if after else 0.0
    extends = requests.prompt_len - requests.cached
    return PathReading(
        requests=len(requests.tokens),
        dirty=count,
        where=_where(dirty, edge),
        shape=(
            "none"
            if not count
            else "contiguous"
            if fraction >= _CONTIGUOUS
            else "scattered"
            if fraction < _SCATTERED
            else "patchy"
        ),
        readings=_readings(dirty) if count else None,
        edge=edge,
        before_decode=int(np.count_nonzero(dirty.first_offset == 0)),
        first_lost=int(np.count_nonzero(dirty.lost)),
        contiguous_fraction=fraction,
        median_abs_nats=float(np.median(dirty.median_abs)) if count else 0.0,
        max_abs_nats=float(dirty.max_abs.max()) if count else 0.0,
        extend_rows=(int(extends.min()), int(extends.max())) if len(extends) else None,
    )


def _requests(columns: HelperColumns, summary: HelperSummary) -> Requests:
    compared = np.flatnonzero(columns.requests_compared)
    tokens = divergent(columns)
    with np.errstate(invalid="ignore"):
        difference = np.abs(columns.prefill_nats.astype(np.float64) - columns.decode_nats.astype(np.float64))
    usable = tokens & np.isfinite(difference)
    medians = np.zeros(len(compared))
    for place, request in enumerate(compared.tolist()):
        part = columns.tokens_of(request)
        if summary.divergent_tokens[request] and usable[part].any():
            medians[place] = np.median(difference[part][usable[part]])
    return Requests(
        prompt_len=columns.prompt_len[compared],
        cached=columns.cached_generation[compared],
        output_len=columns.output_len[compared],
        first_offset=summary.first_offset[compared],
        divergent=summary.divergent_tokens[compared],
        tokens=np.diff(columns.start)[compared],
        median_abs=medians,
        max_abs=summary.max_abs_dlogprob[compared],
        lost=columns.lost[compared],
    )


_NONE: Ints = np.zeros(0, dtype=np.int64)
_NO_REQUESTS = Requests(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0), np.zeros(0), _NONE > 0)


def _readings(dirty: Requests) -> Readings:
    position = dirty.prompt_len + dirty.first_offset
    return Readings(
        position=_range(position),
        offset=_range(dirty.first_offset),
        from_cached=_range(position - dirty.cached) if bool((dirty.cached > 0).all()) else None,
    )


def _range(values: Ints) -> tuple[int, int]:
    return int(values.min()), int(values.max())


def _edge(requests: Requests) -> int | None:
    """The position P with: each request diverges first at P, or at once if its prompt already reaches P, and
    those that never reach P do not diverge. None where there is none, or too few requests show it.
    """
    dirty = requests.part(requests.dirty)
    late = dirty.part(dirty.first_offset > _FIRST_OFFSETS)
    positions = late.prompt_len + late.first_offset
    if len(late.tokens) < FEW_REQUESTS or len(np.unique(late.prompt_len)) < FEW_REQUESTS:
        return None
    if len(np.unique(positions)) != 1:
        return None
    edge = int(positions[0])
    at_once = dirty.part(dirty.first_offset <= _FIRST_OFFSETS)
    clean = requests.part(~requests.dirty)
    reaches = (at_once.prompt_len + at_once.first_offset >= edge).all()
    ends_before = (clean.prompt_len + clean.output_len <= edge).all()
    return edge if bool(reaches) and bool(ends_before) else None


def _where(dirty: Requests, edge: int | None) -> Where:
    offsets = dirty.first_offset
    if not len(offsets):
        return "none"
    if int(offsets.max()) <= _FIRST_OFFSETS:
        return "from_first_token"
    several = len(offsets) >= FEW_REQUESTS and len(np.unique(dirty.prompt_len)) >= FEW_REQUESTS
    if several and len(np.unique(offsets)) == 1:
        return "constant_offset"
    if edge is not None:
        return "constant_position"
    return "mid_generation" if int(offsets.min()) > _FIRST_OFFSETS else "mixed"
