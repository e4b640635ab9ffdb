"""What the server answers to `/generate`, decoded with checked types while it comes.

Invariants: one answer after the other becomes arrays as soon as its last byte is there, so that neither the
whole text nor the objects of the whole response (ten times its text) are ever in memory. Everything here is
untrusted: an answer of another shape is a KlbenchError, never an exception of a parser.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from klbench.errors import UndecidedError

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Entry = tuple[float | None, TokenId, Any]
_QUOTE, _OPENING, _BACKSLASH = b'"{\\'


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
    output_ids: list[TokenId] | None = None


_DECODER = msgspec.json.Decoder(_Answer)
_AROUND = msgspec.json.Decoder(list[dict[str, Any]])
# An answer ends at its last brace that stands in no text. The entries of logprobs hold no braces and texts.
_IS_MARK = bytes(byte in b'"{}\\' for byte in range(256))


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
    first_lost: bool = False
    """The server lost the logprob of the first output token; NaN stands in its place."""

    def with_place_of_lost(self) -> Generated:
        """The answer as it is, or with a place for the one logprob that its server is known to lose.

        sglang 0.5.17 (0.5.23 does not) takes a request that it retracts before its first token for one whose
        first logprob was sent (`logprob_end` in its output streamer): exactly that one never comes.
        """
        logprobs = self.output_logprobs
        if logprobs is None or not self.retractions or not self.output_ids:
            return self
        if logprobs.token_id.tolist() != self.output_ids[1:]:
            return self
        whole = Logprobs(
            np.concatenate([[np.nan], logprobs.nats]),
            np.array(self.output_ids, dtype=np.int64),
            logprobs.missing,
        )
        return replace(self, output_logprobs=whole, first_lost=True)


def _logprobs(entries: list[Entry] | None) -> Logprobs | None:
    if entries is None:
        return None
    values, ids, _ = zip(*entries, strict=True) if entries else ((), (), ())
    # numpy makes NaN of None.
    nats = np.array(values, dtype=np.float64)
    return Logprobs(nats, np.array(ids, dtype=np.int64), int(np.count_nonzero(~np.isfinite(nats))))


def _finish_reason(reason: Any) -> str:
    """The type of the finish reason, with the server's message where it aborted."""
    if not isinstance(reason, dict):
        return str(reason)
    message = reason.get("message")
    return f"{reason.get('type')}: {message}" if message else str(reason.get("type"))


class AnswerStream:
    """The answers of a response of `/generate`, a JSON array of objects that comes part by part.

    stream = AnswerStream(expected=32)
    for part in parts:
        stream.feed(part)
    answers = stream.finish()
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._answers: list[Generated] = []
        self._begun = bytearray()
        """The beginning of the answer that is not whole yet."""
        self._around = bytearray()
        """What stands around the answers, each of them `{}`."""
        self._depth = 0
        self._in_text = False
        self._escaped = False
        """The part before ended with a backslash that has its character in the next."""

    def feed(self, part: bytes | bytearray) -> None:
        """Takes the next part. Raises UndecidedError for an answer that is not what sglang answers."""
        start, plain_from = 0, int(self._escaped and len(part) > 0)
        self._escaped = self._escaped and not part
        for at in np.flatnonzero(np.frombuffer(part.translate(_IS_MARK), dtype=np.bool_)).tolist():
            if at < plain_from:
                continue
            mark = part[at]
            if mark == _BACKSLASH:
                plain_from = at + 2
                self._escaped = plain_from > len(part)
            elif mark == _QUOTE:
                self._in_text = not self._in_text
            elif self._in_text:
                continue
            elif mark == _OPENING:
                if self._depth == 0:
                    self._around += part[start:at]
                    start = at
                self._depth += 1
            elif self._depth > 0:
                self._depth -= 1
                if self._depth == 0:
                    self._begun += part[start : at + 1]
                    start = at + 1
                    self._take()
        (self._begun if self._depth else self._around).extend(part[start:])

    def _take(self) -> None:
        self._answers.append(_generated(_decoded(self._begun)))
        self._around += b"{}"
        self._begun = bytearray()

    def finish(self) -> list[Generated]:
        """All answers, in order. Raises UndecidedError where one is missing or something else came."""
        try:
            _AROUND.decode(self._around + self._begun)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _not_sglang(error) from None
        if len(self._answers) != self._expected:
            raise UndecidedError(f"the server answered {len(self._answers)} of {self._expected} requests")
        return self._answers


def _decoded(text: bytes | bytearray) -> _Answer:
    """One answer. Some servers write NaN and Infinity, which are no JSON; Python's parser reads them."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if not any(word in text for word in (b"NaN", b"Infinity")):
            raise _not_sglang(error) from None
    try:
        return msgspec.convert(json.loads(text), _Answer)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise _not_sglang(error) from None


def _not_sglang(error: Exception) -> UndecidedError:
    return UndecidedError(
        "the server's answer to /generate is not what sglang answers",
        why=str(error),
        next="check that the address is a sglang server, not a router or another program",
    )


def _generated(answer: _Answer) -> Generated:
    meta = answer.meta_info
    return Generated(
        rid=meta.id,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        output_ids=answer.output_ids or [],
        finish_reason=_finish_reason(meta.finish_reason),
        retractions=meta.num_retractions,
        dp_rank=meta.dp_rank,
        input_logprobs=_logprobs(meta.input_token_logprobs),
        output_logprobs=_logprobs(meta.output_token_logprobs),
    )
