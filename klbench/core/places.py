"""Where the differences of a helper lie: by absolute position, by offset, by distance from the cached prefix.

    profile = profile_of(columns, "position", bins=70)
    profile.divergent / profile.compared        the part of each bin's tokens that differs

Divergences at a constant absolute position speak for the edge of a tile or window, at a constant offset for
something that decode does after so many steps, at a constant distance from the cached prefix for the restore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns
from klbench.core.kl import divergent
from klbench.core.statistics import absolute_difference

Ints = npt.NDArray[np.int64]
Axis = Literal["position", "offset", "from_cached"]
AXES: tuple[Axis, ...] = ("position", "offset", "from_cached")
_COMMON = 5


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Bins along one axis. Bin b holds the values `edges[b]` to `edges[b + 1]` - 1; all others are [B].

    `first` counts requests whose first divergent token lies in the bin, `max_abs_nats` is over finite tokens.
    `common_first` are the commonest first values with the number of requests, the commonest first.
    """

    axis: Axis
    edges: Ints
    compared: Ints
    divergent: Ints
    max_abs_nats: npt.NDArray[np.float64]
    first: Ints
    common_first: tuple[tuple[int, int], ...]
    divergent_requests: int

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """[B] the part of the compared tokens that differs; NaN where none was compared."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.compared > 0, self.divergent / self.compared, np.nan)

    @property
    def constant(self) -> int | None:
        """The one value at which all first divergences lie; None where there are several or none."""
        return self.common_first[0][0] if len(self.common_first) == 1 else None


def profile_of(columns: HelperColumns, axis: Axis, bins: int) -> Profile | None:
    """The profile of one helper in at most `bins` bins, None where there is nothing to place.

    `from_cached` is over the requests that restored a prefix.
    """
    counts = np.diff(columns.start)
    owner = np.repeat(np.arange(columns.requests), counts)
    offset = np.arange(len(columns.token_id)) - np.repeat(columns.start[:-1], counts)
    place, kept = _places(columns, axis, owner, offset)
    kept = kept & columns.compared
    if not kept.any():
        return None
    place, owner = place[kept], owner[kept]
    differs, size = divergent(columns)[kept], absolute_difference(columns)[kept]
    low, span = int(place.min()), int(place.max()) - int(place.min()) + 1
    width = -(-span // max(bins, 1))
    count = -(-span // width)
    which = (place - low) // width
    largest = np.zeros(count)
    finite = np.isfinite(size)
    np.maximum.at(largest, which[finite], size[finite])
    # Tokens of a request are in order, so the first that differs is the first of its owner.
    dirty, first_at = np.unique(owner[differs], return_index=True)
    firsts = place[differs][first_at]
    values, times = np.unique(firsts, return_counts=True)
    commonest = np.lexsort((values, -times))[:_COMMON]
    return Profile(
        axis=axis,
        edges=low + width * np.arange(count + 1, dtype=np.int64),
        compared=np.bincount(which, minlength=count).astype(np.int64),
        divergent=np.bincount(which[differs], minlength=count).astype(np.int64),
        max_abs_nats=largest,
        first=np.bincount((firsts - low) // width, minlength=count).astype(np.int64),
        common_first=tuple((int(values[i]), int(times[i])) for i in commonest),
        divergent_requests=len(dirty),
    )


def _places(
    columns: HelperColumns, axis: Axis, owner: Ints, offset: Ints
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """[T] each token's value on the axis, and whether it has one."""
    everything = np.ones(len(owner), dtype=np.bool_)
    if axis == "offset":
        return offset, everything
    position = columns.prompt_len[owner] + offset
    if axis == "position":
        return position, everything
    cached = columns.cached_generation[owner]
    return position - cached, cached > 0


_AT: dict[Axis, str] = {
    "position": "token position {}",
    "offset": "offset {}",
    "from_cached": "cached tokens + {}",
}
_SEVERAL: dict[Axis, str] = {
    "position": "token positions",
    "offset": "offsets",
    "from_cached": "distances from the cached prefix",
}


def sentence(profile: Profile) -> str:
    """What the first divergences say of the axis, in the axis's own words."""
    requests, at = profile.divergent_requests, _AT[profile.axis]
    several = _SEVERAL[profile.axis]
    if not requests:
        return "no token differs"
    value, times = profile.common_first[0]
    where = at.format(value)
    if requests == 1:
        return f"the one divergent request begins to differ at {where}"
    if profile.constant is not None:
        return f"all {requests} divergent requests begin to differ at {where}"
    if times == 1:
        return f"{requests} divergent requests begin to differ at {requests} {several}, no two at the same"
    return f"{requests} divergent requests begin to differ at several {several}, {times} of them at {where}"
