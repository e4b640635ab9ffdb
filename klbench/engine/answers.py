"""What the server answers to `/generate`, decoded with checked types and bounded size.

Everything here is untrusted: an answer of another shape is a KlbenchError, never an exception of a parser.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from klbench.errors import UndecidedError

Entry = tuple[float | None, int, Any]


class _MetaInfo(msgspec.Struct):
    """The part of `meta_info` that klbench reads. `cached_tokens` is missing behind a router."""

    id: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int | None = None
    finish_reason: Any = None
    num_retractions: int = 0
    dp_rank: int | None = None
    input_token_logprobs: list[Entry] | None = None
    output_token_logprobs: list[Entry] | None = None


class _Answer(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(list[_Answer])


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Logprobs [n] in nats as the server returned them, of tokens `token_id` [n].

    float64, so that arithmetic is sglang's own; NaN stands for what JSON cannot hold (null): NaN or an
    infinity on the server's side. `missing` counts those.
    """

    nats: npt.NDArray[np.float64]
    token_id: npt.NDArray[np.int64]
    missing: int

    def __len__(self) -> int:
        return len(self.token_id)


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """One request's answer. `input_logprobs` and `output_logprobs` are None where none were asked for."""

    rid: str
    prompt_tokens: int
    cached_tokens: int | None
    output_ids: list[int]
    finish_reason: str
    retractions: int
    dp_rank: int | None
    input_logprobs: Logprobs | None
    output_logprobs: Logprobs | None


def _logprobs(entries: list[Entry] | None) -> Logprobs | None:
    if entries is None:
        return None
    nats = np.array([np.nan if nats is None else nats for nats, _, _ in entries], dtype=np.float64)
    token_id = np.array([token for _, token, _ in entries], dtype=np.int64)
    return Logprobs(nats, token_id, int(np.count_nonzero(~np.isfinite(nats))))


def _finish_reason(reason: Any) -> str:
    """The type of the finish reason, with the server's message where it aborted."""
    if not isinstance(reason, dict):
        return str(reason)
    message = reason.get("message")
    return f"{reason.get('type')}: {message}" if message else str(reason.get("type"))


def decode_generated(body: bytes, expected: int) -> list[Generated]:
    """The answers in `body`, one per request, in order. Raises UndecidedError for anything else."""
    try:
        answers = _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        answers = _decode_leniently(body, error)
    if len(answers) != expected:
        raise UndecidedError(f"the server answered {len(answers)} of {expected} requests")
    return [
        Generated(
            rid=answer.meta_info.id,
            prompt_tokens=answer.meta_info.prompt_tokens,
            cached_tokens=answer.meta_info.cached_tokens,
            output_ids=answer.output_ids or [],
            finish_reason=_finish_reason(answer.meta_info.finish_reason),
            retractions=answer.meta_info.num_retractions,
            dp_rank=answer.meta_info.dp_rank,
            input_logprobs=_logprobs(answer.meta_info.input_token_logprobs),
            output_logprobs=_logprobs(answer.meta_info.output_token_logprobs),
        )
        for answer in answers
    ]


def _decode_leniently(body: bytes, first: Exception) -> list[_Answer]:
    """Some servers write NaN and Infinity, which are no JSON; Python's parser reads them."""
    try:
        if not any(word in body for word in (b"NaN", b"Infinity")):
            raise first
        return msgspec.convert(json.loads(body), list[_Answer])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UndecidedError(
            "the server's answer to /generate is not what sglang answers",
            why=str(error),
            next="check that the address is a sglang server, not a router or another program",
        ) from None
