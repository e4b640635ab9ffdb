"""What one helper measured, as columns: one array per quantity, tokens of all requests end to end.

Requests that the helper dropped (a cache miss in a hit helper) keep their row and have no tokens, so
nothing that was not compared can look equal. `start[i]:start[i + 1]` are the tokens of request i; where the
server lost the decode logprob of the first of them, that token is there and is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

HelperName = Literal["match", "prefill_cache_hit", "decode_cache_hit"]
HELPERS: tuple[HelperName, ...] = ("match", "prefill_cache_hit", "decode_cache_hit")
ArmName = Literal["warming", "generation", "scoring"]


def _nothing_lost() -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class HelperColumns:
    """Columns of one helper over N requests and their T tokens.

    Requests (all [N]): `prompt_len` tokens of the prompt whose continuation is judged (for
    decode_cache_hit the second turn's prompt), `cached_generation` and `cached_scoring` cached tokens in
    those arms, `output_len` generated tokens, `dropped` whether the helper left the request out, `lost`
    whether the decode logprob of its first token was lost (NaN stands there); left out, none was.
    Tokens (all [T]): `token_id`, `decode_nats` and `prefill_nats`, the two logprobs of the same token
    exactly as the server returned them (float32). `prompt_ids` are the prompts end to end, request i at
    `prompt_start[i]:prompt_start[i + 1]`; `start` is [N + 1] into the tokens.
    """

    helper: HelperName
    prompt_len: npt.NDArray[np.int64]
    cached_generation: npt.NDArray[np.int64]
    cached_scoring: npt.NDArray[np.int64]
    output_len: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.bool_]
    start: npt.NDArray[np.int64]
    token_id: npt.NDArray[np.int32]
    decode_nats: npt.NDArray[np.float32]
    prefill_nats: npt.NDArray[np.float32]
    prompt_start: npt.NDArray[np.int64]
    prompt_ids: npt.NDArray[np.int32]
    lost: npt.NDArray[np.bool_] = field(default_factory=_nothing_lost)

    def __post_init__(self) -> None:
        if not len(self.lost):
            object.__setattr__(self, "lost", np.zeros(len(self.prompt_len), dtype=np.bool_))

    @property
    def requests(self) -> int:
        return len(self.prompt_len)

    def tokens_of(self, request: int) -> slice:
        """The slice of the token columns that holds `request`'s generated tokens."""
        return slice(int(self.start[request]), int(self.start[request + 1]))

    def tokens_generated(self, request: int) -> list[int]:
        """The ids of `request`'s generated tokens; none of a dropped one."""
        ids: list[int] = self.token_id[self.tokens_of(request)].tolist()
        return ids

    def compared_of(self, request: int) -> slice:
        """The same slice without a first token whose logprob was lost."""
        return slice(int(self.start[request]) + int(self.lost[request]), int(self.start[request + 1]))

    @property
    def compared(self) -> npt.NDArray[np.bool_]:
        """[T] whether a token has both of its logprobs."""
        flags = np.ones(len(self.token_id), dtype=np.bool_)
        flags[self.start[:-1][self.lost]] = False
        return flags

    @property
    def tokens_compared(self) -> npt.NDArray[np.int64]:
        """[N] the tokens of each request that have both of their logprobs; 0 for a dropped one."""
        counts: npt.NDArray[np.int64] = np.diff(self.start) - self.lost
        return counts

    @property
    def requests_compared(self) -> npt.NDArray[np.bool_]:
        """[N] whether anything of a request was compared."""
        flags: npt.NDArray[np.bool_] = ~self.dropped & (self.tokens_compared > 0)
        return flags

    def prompt_of(self, request: int) -> npt.NDArray[np.int32]:
        """The token ids of `request`'s prompt."""
        return self.prompt_ids[self.prompt_start[request] : self.prompt_start[request + 1]]


def compared_in_both(a: HelperColumns, b: HelperColumns) -> tuple[HelperColumns, HelperColumns]:
    """Two measurements of the same requests, each without the tokens that the other one lost."""
    return _without(a, b.lost), _without(b, a.lost)


def _without(columns: HelperColumns, lost: npt.NDArray[np.bool_]) -> HelperColumns:
    there = np.zeros(columns.requests, dtype=np.bool_)
    there[: len(lost)] = lost[: columns.requests]
    there &= np.diff(columns.start) > 0
    return replace(columns, lost=columns.lost | there)
