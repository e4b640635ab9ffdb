"""The arms of the three helpers, as sglang's kl_test_utils runs them: same requests, same order, same rules.

    match               flush, generate                                    | flush, score
    prefill_cache_hit   flush, prefill the prompts, generate on that cache | flush, score
    decode_cache_hit    flush, generate; then generate on prompt + output + "," | flush, score

One POST per arm with the whole list, because other batches can have other bits. A request that missed the
cache in a hit helper is dropped (kept as a row without tokens). Whatever the server answered is checked
before it is believed: lengths, token ids, None only at index 0, cached tokens, finish reasons. Of the warming
arm only the tokens are used, so only they are checked.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klbench.core.columns import ArmName, HelperColumns, HelperName
from klbench.engine.answers import Generated
from klbench.engine.client import ServerClient
from klbench.engine.generation_arm import GenerationArm, Keep
from klbench.engine.progress import ArmObserver, Look, watch_arm
from klbench.errors import UndecidedError

Rids = Callable[[ArmName, int], str]


@dataclass(frozen=True, slots=True)
class ArmOptions:
    """What may differ between servers. `separator_ids` stands for the "," between the turns of
    decode_cache_hit; None asks the server's tokenizer, with special tokens, as kl_test_utils does."""

    separator_ids: tuple[int, ...] | None = None
    routed_dp_rank: int | None = None
    vocab_size: int | None = None
    look: Callable[[int], Look] | None = None
    """Makes what looks at the server while one arm with so many requests runs on it."""
    flush: bool = True
    """False leaves the server's cache as it is: for prompts that this server has never seen. Scoring from
    the first token on uses no cache, and what each request of the generation arm found cached is said."""
    retracted: Callable[[int], None] | None = None
    """Hears the index of each request that the server retracted and computed again, once for each arm."""


@dataclass(frozen=True, slots=True)
class Widen:
    """Other, and more, rows behind the same restored prefix: request i keeps `restored[i]` tokens of its
    prompt, and `rows` follow. The first of them is not the token that stood there, so no more is restored."""

    restored: Sequence[int]
    rows: int

    def wider(self, prompt: Sequence[int], index: int) -> list[int]:
        kept = min(self.restored[index], len(prompt))
        there = prompt[kept] if kept < len(prompt) else None
        # Its own tokens, from the first one on that is another.
        other = next((place for place, token in enumerate(prompt) if token != there), None)
        if other is None:
            raise UndecidedError(
                f"request {index} cannot be widened", why="its prompt is one token again and again"
            )
        own = itertools.cycle([*prompt[other:], *prompt[:other]])
        return [*prompt[:kept], *itertools.islice(own, self.rows)]


class NotRepeatedError(UndecidedError):
    """The server generated other tokens than in the run that is repeated."""


class _Silent:
    """Hears nothing."""

    def arm_started(self, *_: object) -> None: ...

    def arm_progress(self, *_: object) -> None: ...

    def arm_stalled(self, *_: object) -> None: ...

    def arm_unseen(self, *_: object) -> None: ...

    def arm_ended(self, *_: object) -> None: ...


async def run_arms(
    client: ServerClient,
    helper: HelperName,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    generation_tokens: int | None = None,
    widen: Widen | None = None,
    rids: Rids | None = None,
    measured: HelperColumns | None = None,
    must_repeat: bool = True,
    observe: ArmObserver | None = None,
    options: ArmOptions | None = None,
    earlier: GenerationArm | None = None,
    keep: Keep | None = None,
) -> HelperColumns:
    """Runs one helper's arms on the server and returns its columns.

    `generation_tokens` cuts the generation arm alone. With `measured` the arms repeat that run: the second
    turn's prompts and the dropped requests are its own, and the scoring arm scores its whole sequences;
    where other tokens come NotRepeatedError is raised, or unless it `must_repeat` the arms go on without it.
    `widen` gives each request other tokens behind the prefix that it restores. `rids` names request i of an
    arm. `keep` gets the generation arm before the scoring begins; given back as `earlier`, that arm and what
    came before it are not repeated.
    Raises KlbenchError when an answer cannot be compared; cancelled, the requests in flight are aborted on
    the server.
    """
    if not prompts:
        raise UndecidedError("there is no prompt to run")
    options = options or ArmOptions()
    arms = _Arms(client, rids or _own_rids(), observe or _Silent(), options)
    new_tokens = max_new_tokens if generation_tokens is None else min(generation_tokens, max_new_tokens)
    if earlier is not None:
        turn, answers = [list(prompt) for prompt in earlier.prompts], list(earlier.answers)
        for index, answer in enumerate(answers):
            _check_output(index, answer, new_tokens)
    else:
        await arms.flush()
        turn = [list(prompt) for prompt in prompts]
        if helper == "prefill_cache_hit":
            await arms.prefill("warming", turn)
        elif helper == "decode_cache_hit":
            first = await arms.generate("warming", turn, max_new_tokens)
            turn = await arms.second_turn(turn, first)
            measured = _repeated(measured, must_repeat, lambda before: _check_turn(turn, before))
        if widen is not None:
            turn = [widen.wider(prompt, index) for index, prompt in enumerate(turn)]
        answers = await arms.generate("generation", turn, new_tokens)
    generated = [_with_logprobs(index, answer) for index, answer in enumerate(answers)]
    if keep is not None and earlier is None:
        keep(GenerationArm(turn, generated))
    measured = _repeated(measured, must_repeat, lambda before: _check_tokens(generated, before))
    cached = [_cached_tokens(answer, len(prompt)) for answer, prompt in zip(generated, turn, strict=True)]
    if measured is not None:
        dropped = [bool(flag) for flag in measured.dropped]
    elif helper == "prefill_cache_hit":
        dropped = [tokens == 0 for tokens in cached]
    elif helper == "decode_cache_hit":
        dropped = [tokens <= len(prompt) + 1 for tokens, prompt in zip(cached, prompts, strict=True)]
    else:
        dropped = [False] * len(turn)
    kept = [index for index, is_dropped in enumerate(dropped) if not is_dropped]
    sequences = {
        index: turn[index]
        + (generated[index].output_ids if measured is None else measured.tokens_generated(index))
        for index in kept
    }
    await arms.flush()
    scored = await arms.score(sequences) if kept else {}
    return _columns(helper, turn, generated, cached, dropped, scored)


def _own_rids() -> Rids:
    nonce = secrets.token_hex(4)
    return lambda arm, index: f"klbench-{nonce}-{arm}-{index}"


class _Arms:
    """The passes over one server, with progress."""

    def __init__(self, client: ServerClient, rids: Rids, observe: ArmObserver, options: ArmOptions) -> None:
        self._client = client
        self._rids = rids
        self._observe = observe
        self._options = options

    async def flush(self) -> None:
        if self._options.flush:
            await self._client.flush()

    async def prefill(self, arm: ArmName, prompts: list[list[int]]) -> None:
        await self._pass(arm, dict(enumerate(prompts)), 0, return_logprob=False, logprob_start_len=-1)

    async def generate(self, arm: ArmName, prompts: list[list[int]], new_tokens: int) -> list[Generated]:
        answers = await self._pass(
            arm, dict(enumerate(prompts)), new_tokens, return_logprob=True, logprob_start_len=-1
        )
        for index, answer in answers.items():
            _check_output(index, answer, new_tokens)
        return list(answers.values())

    async def score(self, sequences: dict[int, list[int]]) -> dict[int, Generated]:
        answers = await self._pass("scoring", sequences, 0, return_logprob=True, logprob_start_len=0)
        for index, answer in answers.items():
            _check_scored(index, answer, sequences[index], self._options.vocab_size)
        return answers

    async def second_turn(self, first_turn: list[list[int]], first: list[Generated]) -> list[list[int]]:
        """Prompt, output and a "," of each request."""
        separator = self._options.separator_ids
        if separator is None:
            (ids,) = await self._client.tokenize([","])
            separator = tuple(ids)
        return [
            prompt + answer.output_ids + list(separator)
            for prompt, answer in zip(first_turn, first, strict=True)
        ]

    async def _pass(
        self,
        arm: ArmName,
        prompts: dict[int, list[int]],
        new_tokens: int,
        *,
        return_logprob: bool,
        logprob_start_len: int,
    ) -> dict[int, Generated]:
        total = sum(map(len, prompts.values())) + len(prompts) * new_tokens
        self._observe.arm_started(arm, len(prompts), total)
        started = time.monotonic()
        rids = [self._rids(arm, index) for index in prompts]
        work = self._client.generate(
            list(prompts.values()),
            max_new_tokens=new_tokens,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            rids=rids,
            routed_dp_rank=self._options.routed_dp_rank,
        )
        look = self._options.look(len(prompts)) if self._options.look is not None else None
        answers = await _watched(work, arm, total, look, self._observe)
        elapsed_s = time.monotonic() - started
        for index, rid, answer in zip(prompts, rids, answers, strict=True):
            if answer.rid != rid:
                raise UndecidedError(
                    f"the answer to request {index} of the {arm} arm carries another id",
                    why=f"sent {rid}, got {answer.rid[:80]!r}",
                    next="check that no router stands between klbench and the server",
                )
            if answer.finish_reason.startswith("abort"):
                raise UndecidedError(
                    f"the server aborted request {index} of the {arm} arm", why=answer.finish_reason
                )
            if answer.retractions and self._options.retracted is not None:
                self._options.retracted(index)
        self._observe.arm_progress(arm, total, total, elapsed_s, 0.0)
        self._observe.arm_ended(arm, elapsed_s)
        return dict(zip(prompts, answers, strict=True))


async def _watched(
    work: Coroutine[Any, Any, list[Generated]],
    arm: ArmName,
    total: int,
    look: Look | None,
    observe: ArmObserver,
) -> list[Generated]:
    """Does the work of the arm while its progress is watched; what the watcher raises ends the work."""
    if look is None:
        return await work
    working = asyncio.create_task(work)
    watcher = asyncio.create_task(watch_arm(arm, total, look, observe))
    try:
        await asyncio.wait([working, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await watcher
        return await working
    finally:
        for task in (watcher, working):
            task.cancel()
        await asyncio.gather(watcher, working, return_exceptions=True)


def _cached_tokens(answer: Generated, prompt_len: int) -> int:
    if answer.cached_tokens is None:
        raise UndecidedError(
            "the server does not say how many tokens came from its cache",
            why="meta_info.cached_tokens is missing",
            next="attach to the sglang server itself, not to a router",
        )
    if not 0 <= answer.cached_tokens <= prompt_len:
        raise UndecidedError(
            f"the server reports {answer.cached_tokens} cached tokens for a prompt of {prompt_len}"
        )
    return answer.cached_tokens


def _check_output(index: int, answer: Generated, new_tokens: int) -> None:
    if not answer.output_ids:
        raise UndecidedError(
            f"request {index} generated nothing", why=f"it finished with {answer.finish_reason}"
        )
    if len(answer.output_ids) > new_tokens:
        raise UndecidedError(
            f"request {index} generated {len(answer.output_ids)} tokens, {new_tokens} were asked for"
        )


def _with_logprobs(index: int, answer: Generated) -> Generated:
    """The answer with a logprob for each output token, NaN for one that was lost."""
    answer = answer.with_place_of_lost()
    logprobs = answer.output_logprobs
    if logprobs is None:
        raise UndecidedError(f"the server returned no logprobs for the output of request {index}")
    if answer.output_ids != logprobs.token_id.tolist():
        raise UndecidedError(
            f"the logprobs of request {index} do not belong to its output",
            why=f"{len(answer.output_ids)} output tokens, {len(logprobs)} logprobs, or other token ids",
        )
    return answer


def _as_reported(sequence: list[int], vocab_size: int | None) -> list[int]:
    """The ids as sglang names them beside their scores: from the vocabulary's last one on it says 0, for it
    takes them for hashes of images. Their scores are right."""
    if vocab_size is None:
        return sequence
    return [token if token < vocab_size - 1 else 0 for token in sequence]


def _check_scored(index: int, answer: Generated, sequence: list[int], vocab_size: int | None) -> None:
    logprobs = answer.input_logprobs
    if logprobs is None or logprobs.token_id.tolist() != _as_reported(sequence, vocab_size):
        found = 0 if logprobs is None else len(logprobs)
        raise UndecidedError(
            f"the scores of request {index} do not belong to its tokens",
            why=f"{len(sequence)} tokens were sent, {found} were scored, or other token ids",
            next="check that the server does not shorten or change its input",
        )
    if not np.isnan(logprobs.nats[0]):
        raise UndecidedError(
            f"the scores of request {index} are shifted", why="its first token has a logprob, which cannot be"
        )


def _repeated(
    measured: HelperColumns | None, must_repeat: bool, check: Callable[[HelperColumns], None]
) -> HelperColumns | None:
    """`measured`, or None where the check shows that the arms do not repeat it and need not."""
    if measured is not None:
        try:
            check(measured)
        except NotRepeatedError:
            if must_repeat:
                raise
            return None
    return measured


def _check_turn(turn: list[list[int]], measured: HelperColumns) -> None:
    for index, prompt in enumerate(turn):
        if prompt != measured.prompt_of(index).tolist():
            raise _not_repeated(index, "its first turn generated other tokens than before")


def _check_tokens(generated: list[Generated], measured: HelperColumns) -> None:
    for index, answer in enumerate(generated):
        before = measured.tokens_generated(index)
        if not measured.dropped[index] and answer.output_ids != before[: len(answer.output_ids)]:
            raise _not_repeated(index, "it generated other tokens than before")


def _not_repeated(index: int, how: str) -> NotRepeatedError:
    return NotRepeatedError(
        f"request {index} did not repeat: {how}",
        why="the server's results changed between the two runs",
        next="run the helpers twice to see whether the server repeats itself",
    )


def _columns(
    helper: HelperName,
    prompts: list[list[int]],
    generated: list[Generated],
    cached: list[int],
    dropped: list[bool],
    scored: dict[int, Generated],
) -> HelperColumns:
    decode: list[npt.NDArray[np.float64]] = []
    prefill: list[npt.NDArray[np.float64]] = []
    token_id: list[npt.NDArray[np.int64]] = []
    counts = []
    for index, answer in enumerate(generated):
        if dropped[index]:
            counts.append(0)
            continue
        output, scores = answer.output_logprobs, scored[index].input_logprobs
        assert output is not None
        assert scores is not None
        first = len(prompts[index])
        decode.append(output.nats)
        prefill.append(scores.nats[first : first + len(output)])
        token_id.append(output.token_id)
        counts.append(len(output))
    scoring_cached = [0] * len(prompts)
    for index, answer in scored.items():
        scores = answer.input_logprobs
        scoring_cached[index] = _cached_tokens(answer, 0 if scores is None else len(scores))
    return HelperColumns(
        helper=helper,
        prompt_len=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        cached_generation=np.array(cached, dtype=np.int64),
        cached_scoring=np.array(scoring_cached, dtype=np.int64),
        output_len=np.array([len(answer.output_ids) for answer in generated], dtype=np.int64),
        dropped=np.array(dropped, dtype=np.bool_),
        start=_starts(counts),
        token_id=_joined(token_id).astype(np.int32),
        decode_nats=_as_float32(_joined(decode)),
        prefill_nats=_as_float32(_joined(prefill)),
        prompt_start=_starts([len(prompt) for prompt in prompts]),
        prompt_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
        lost=np.array(
            [answer.first_lost and not out for answer, out in zip(generated, dropped, strict=True)],
            dtype=np.bool_,
        ),
    )


def _starts(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float64)


def _as_float32(nats: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The float32 values that the server computed; nothing may be lost, for equality is judged on them."""
    narrow = nats.astype(np.float32)
    if not np.array_equal(narrow.astype(np.float64), nats, equal_nan=True):
        raise UndecidedError(
            "the server's logprobs are no float32 values",
            why="their bits cannot be compared as they were computed",
        )
    return narrow
