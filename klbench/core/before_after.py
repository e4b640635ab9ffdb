"""The same prompts measured twice: what changed, helper by helper and token by token.

    change = compare_columns(before, after)
    change.fixed, change.introduced          tokens that diverged before and no more, and the other way round

Tokens are compared while both generated the same ones: behind the first other token the two texts have
nothing in common. What was not compared is counted, never taken for unchanged; a token whose logprob either
run lost is not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import HelperColumns, compared_in_both
from klbench.core.kl import divergent


@dataclass(frozen=True, slots=True)
class RequestChange:
    """One request whose numbers changed; counts are tokens. `parted_at` is the offset of the first other
    token, None where both generated the same."""

    index: int
    compared: int
    not_compared: int
    fixed: int
    introduced: int
    remaining: int
    decode_changed: int
    prefill_changed: int
    parted_at: int | None
    first_changed: int | None
    """Offset of the first token of which a logprob changed."""


@dataclass(frozen=True, slots=True)
class HelperChange:
    """One helper, before and after; counts are tokens unless they say requests.

    `fixed` diverged before and does not after, `introduced` the other way round, `remaining` diverges in
    both.
    `decode_changed` and `prefill_changed` count tokens whose logprob has other bits than before in that arm.
    """

    requests: int
    requests_compared: int
    other_prompts: int
    """Requests with another prompt: for decode_cache_hit the first turn went another way."""
    dropped: int
    """Requests that one of the two left out."""
    compared: int
    not_compared: int
    fixed: int
    introduced: int
    remaining: int
    decode_changed: int
    prefill_changed: int
    max_abs_decode_change: float
    max_abs_prefill_change: float
    changed_requests: tuple[RequestChange, ...]

    @property
    def differs(self) -> bool:
        return bool(self.decode_changed or self.prefill_changed or self.other_prompts or self.dropped) or any(
            change.parted_at is not None for change in self.changed_requests
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"changed_requests": [asdict(part) for part in self.changed_requests]}


def compare_columns(before: HelperColumns, after: HelperColumns) -> HelperChange:
    """What changed between two measurements of one helper. Raises ValueError for different helpers or other
    numbers of requests."""
    if before.helper != after.helper or before.requests != after.requests:
        raise ValueError("not the same helper with the same number of requests")
    before, after = compared_in_both(before, after)
    kept, dirty = before.compared, (divergent(before), divergent(after))
    changes: list[RequestChange] = []
    other_prompts = dropped = compared_requests = tokens = 0
    largest = [0.0, 0.0]
    for index in range(before.requests):
        if before.dropped[index] or after.dropped[index]:
            dropped += bool(before.dropped[index] != after.dropped[index])
            continue
        if not np.array_equal(before.prompt_of(index), after.prompt_of(index)):
            other_prompts += 1
            continue
        compared_requests += 1
        change, differences = _request(before, after, index, kept, dirty)
        tokens += change.compared
        largest = [max(pair) for pair in zip(largest, differences, strict=True)]
        counts = (change.decode_changed, change.prefill_changed, change.fixed, change.introduced)
        if any(counts) or change.remaining or change.parted_at is not None:
            changes.append(change)
    all_tokens = max(len(before.token_id), len(after.token_id))
    return HelperChange(
        requests=before.requests,
        requests_compared=compared_requests,
        other_prompts=other_prompts,
        dropped=dropped,
        compared=tokens,
        not_compared=all_tokens - tokens,
        fixed=sum(change.fixed for change in changes),
        introduced=sum(change.introduced for change in changes),
        remaining=sum(change.remaining for change in changes),
        decode_changed=sum(change.decode_changed for change in changes),
        prefill_changed=sum(change.prefill_changed for change in changes),
        max_abs_decode_change=largest[0],
        max_abs_prefill_change=largest[1],
        changed_requests=tuple(changes),
    )


def _request(
    before: HelperColumns,
    after: HelperColumns,
    index: int,
    kept: npt.NDArray[np.bool_],
    dirty: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
) -> tuple[RequestChange, tuple[float, float]]:
    one, two = before.tokens_of(index), after.tokens_of(index)
    count = min(one.stop - one.start, two.stop - two.start)
    longest = max(one.stop - one.start, two.stop - two.start)
    same = before.token_id[one][:count] == after.token_id[two][:count]
    common = count if same.all() else int(np.argmin(same))
    parted_at = common if common < longest else None
    was, now = dirty[0][one][:common], dirty[1][two][:common]
    kept = kept[one][:common]
    decode = _changed(before.decode_nats[one][:common], after.decode_nats[two][:common], kept)
    prefill = _changed(before.prefill_nats[one][:common], after.prefill_nats[two][:common], kept)
    either = decode[0] | prefill[0]
    compared = int(np.count_nonzero(kept))
    change = RequestChange(
        index=index,
        compared=compared,
        not_compared=longest - compared,
        fixed=int(np.count_nonzero(was & ~now)),
        introduced=int(np.count_nonzero(now & ~was)),
        remaining=int(np.count_nonzero(was & now)),
        decode_changed=int(np.count_nonzero(decode[0])),
        prefill_changed=int(np.count_nonzero(prefill[0])),
        parted_at=parted_at,
        first_changed=int(np.argmax(either)) if either.any() else None,
    )
    return change, (decode[1], prefill[1])


def _changed(
    one: npt.NDArray[np.float32], two: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], float]:
    """Which of the kept values have other bits, and their largest finite difference in nats."""
    changed: npt.NDArray[np.bool_] = (one.view(np.uint32) != two.view(np.uint32)) & kept
    finite = np.isfinite(one) & np.isfinite(two) & kept
    differences = np.abs(one[finite].astype(np.float64) - two[finite].astype(np.float64))
    return changed, float(differences.max(initial=0.0))
