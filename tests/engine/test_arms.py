"""The arms against a server that is only a few functions: order of calls, the dropped rule, every check."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from klbench.engine import progress
from klbench.engine.answers import Generated, Logprobs
from klbench.engine.arms import (
    ArmOptions,
    NotRepeatedError,
    Widen,
    _Silent,
    run_arms,
)
from klbench.engine.client import Load
from klbench.engine.progress import Seen, TokenCounter, from_load
from klbench.errors import DeadlineError, UndecidedError
from klbench.session.arm_file import SavedArm, load_arm, save_arm

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
COMMA = 44


def logprobs(ids: Sequence[int], nats: Sequence[float]) -> Logprobs:
    values = np.array(nats, dtype=np.float64)
    return Logprobs(values, np.array(ids, dtype=np.int64), int(np.count_nonzero(~np.isfinite(values))))


class FakeServer:
    """Generates 100, 101, ... and scores each token with -token / 64; `mend` changes one answer."""

    def __init__(self, cached: Sequence[int] = (0, 0), mend: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cached = list(cached)
        self.mend = mend or (lambda _, answer: answer)

    async def flush(self) -> None:
        self.calls.append(("flush",))

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls.append(("tokenize", *texts))
        return [[COMMA] for _ in texts]

    async def generate(self, input_ids: Sequence[Sequence[int]], **how: Any) -> list[Generated]:
        rids, new_tokens = how["rids"], how["max_new_tokens"]
        arm = rids[0].split("-")[-2]
        self.calls.append((arm, [list(ids) for ids in input_ids], new_tokens, how["logprob_start_len"]))
        answers = []
        for index, (rid, ids) in enumerate(zip(rids, input_ids, strict=True)):
            output = [100 + n for n in range(new_tokens)]
            scored = how["return_logprob"] and how["logprob_start_len"] == 0
            answers.append(
                Generated(
                    rid=rid,
                    prompt_tokens=len(ids),
                    cached_tokens=self.cached[index] if arm == "generation" else 0,
                    output_ids=output,
                    finish_reason="length",
                    retractions=0,
                    dp_rank=None,
                    input_logprobs=logprobs(ids, [np.nan, *(-token / 64 for token in ids[1:])])
                    if scored
                    else None,
                    output_logprobs=logprobs(output, [-token / 64 for token in output]),
                )
            )
        return [self.mend(arm, answer) for answer in answers]


async def run(server: FakeServer, helper: Any, **more: Any) -> Any:
    return await run_arms(server, helper, PROMPTS, max_new_tokens=2, **more)  # type: ignore[arg-type]


async def test_match_flushes_generates_flushes_and_scores() -> None:
    server = FakeServer()
    columns = await run(server, "match")
    assert server.calls == [
        ("flush",),
        ("generation", PROMPTS, 2, -1),
        ("flush",),
        ("scoring", [[1, 2, 3, 100, 101], [4, 5, 6, 7, 100, 101]], 0, 0),
    ]
    assert columns.token_id.tolist() == [100, 101, 100, 101]
    assert columns.start.tolist() == [0, 2, 4]
    assert np.array_equal(columns.decode_nats, columns.prefill_nats)
    assert columns.decode_nats.dtype == np.float32


async def test_without_flushing_the_arms_are_the_same() -> None:
    server = FakeServer(cached=(0, 1))
    columns = await run(server, "match", options=ArmOptions(flush=False))
    assert [call[0] for call in server.calls] == ["generation", "scoring"]
    assert columns.cached_generation.tolist() == [0, 1]


async def test_the_vocabularys_last_id_is_reported_as_0_and_counts_as_itself() -> None:
    """sglang names ids from there on 0 beside their scores, in a prompt as in the output."""

    def mend(arm: str, answer: Generated) -> Generated:
        if arm != "scoring" or answer.input_logprobs is None:
            return answer
        seen = answer.input_logprobs.token_id.copy()
        seen[seen >= 101] = 0
        return replace(answer, input_logprobs=replace(answer.input_logprobs, token_id=seen))

    columns = await run(FakeServer(mend=mend), "match", options=ArmOptions(vocab_size=102))
    assert columns.token_id.tolist() == [100, 101, 100, 101]
    with pytest.raises(UndecidedError, match="do not belong"):
        await run(FakeServer(mend=mend), "match", options=ArmOptions(vocab_size=200))


async def test_requests_that_were_retracted_are_named() -> None:
    retracted: list[int] = []

    def mend(arm: str, answer: Generated) -> Generated:
        again = arm == "generation" and answer.rid.endswith("-1")
        return replace(answer, retractions=2) if again else answer

    await run(FakeServer(mend=mend), "match", options=ArmOptions(retracted=retracted.append))
    assert retracted == [1]


def losing(*arms: str, keeping: slice = slice(1, None), retractions: int = 1) -> Any:
    """Keeps these of request 1's output logprobs in these arms, in which the server retracted it."""

    def mend(arm: str, answer: Generated) -> Generated:
        if arm not in arms or not answer.rid.endswith("-1"):
            return answer
        kept = answer.output_ids[keeping]
        nats = [-token / 64 for token in kept]
        return replace(answer, retractions=retractions, output_logprobs=logprobs(kept, nats))

    return mend


async def test_a_first_logprob_that_a_retraction_lost_leaves_its_token_out_of_the_comparison() -> None:
    server = FakeServer(mend=losing("generation"))
    columns = await run(server, "match")
    whole = await run(FakeServer(), "match")
    assert [call[0] for call in server.calls] == ["flush", "generation", "flush", "scoring"]
    assert columns.lost.tolist() == [False, True]
    assert whole.lost.tolist() == [False, False]
    assert np.isnan(columns.decode_nats).tolist() == [False, False, True, False]
    assert columns.token_id.tolist() == whole.token_id.tolist() == [100, 101, 100, 101]
    assert columns.prefill_nats.tolist() == whole.prefill_nats.tolist()
    assert columns.decode_nats[columns.compared].tolist() == whole.decode_nats[columns.compared].tolist()


async def test_what_the_warming_arm_lost_is_not_needed() -> None:
    mend = losing("warming", keeping=slice(0, 0))
    columns = await run(FakeServer(cached=(5, 6), mend=mend), "decode_cache_hit")
    whole = await run(FakeServer(cached=(5, 6)), "decode_cache_hit")
    assert columns.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert not columns.lost.any()


async def test_a_dropped_request_has_no_token_that_could_be_lost() -> None:
    columns = await run(FakeServer(cached=(3, 0), mend=losing("generation")), "prefill_cache_hit")
    assert columns.dropped.tolist() == [False, True]
    assert columns.lost.tolist() == [False, False]


@pytest.mark.parametrize("new_tokens", [1, 2])
async def test_a_capture_repeats_a_request_whose_logprob_is_lost_again(new_tokens: int) -> None:
    measured = await run(FakeServer(mend=losing("generation")), "match")
    server = FakeServer(mend=losing("generation"))
    again = await run(server, "match", measured=measured, generation_tokens=new_tokens)
    assert server.calls[-1][1] == [[1, 2, 3, 100, 101], [4, 5, 6, 7, 100, 101]], "whole sequences are scored"
    assert again.lost.tolist() == [False, True]
    assert again.tokens_compared.tolist() == [new_tokens, new_tokens - 1]


async def test_a_kept_arm_goes_on_without_the_lost_logprob(tmp_path: Path) -> None:
    file = tmp_path / "1-match-generation.npz"
    first = await run(
        FakeServer(mend=losing("generation")),
        "match",
        keep=lambda arm: save_arm(file, SavedArm(arm, "0" * 64, {})),
    )
    kept = load_arm(file)
    assert kept is not None
    server = FakeServer()
    went_on = await run(server, "match", earlier=kept.arm)
    assert [call[0] for call in server.calls] == ["flush", "scoring"]
    assert went_on.lost.tolist() == first.lost.tolist() == [False, True]
    assert went_on.decode_nats.tobytes() == first.decode_nats.tobytes()


async def test_a_kept_arm_that_names_what_it_has_as_lost_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "1-match-generation.npz"
    await run(FakeServer(), "match", keep=lambda arm: save_arm(file, SavedArm(arm, "0" * 64, {})))
    assert load_arm(file) is not None
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    without = {name: values for name, values in arrays.items() if name != "first_lost"}
    np.savez_compressed(file, **without)
    assert load_arm(file) is not None, "a file of an older version"
    for damaged in ([True, False], [False]):
        np.savez_compressed(file, **{**arrays, "first_lost": np.array(damaged)})
        assert load_arm(file) is None


async def test_the_load_is_told_to_whom_it_concerns() -> None:
    class Busy:
        answer_bytes = 0

        async def load(self) -> Load:
            return Load(running=3, queued=2, used_tokens=70)

    heard: list[Load] = []
    seen = await from_load(Busy(), heard.append)()  # type: ignore[arg-type]
    assert seen.tokens == 70
    assert heard == [Load(3, 2, 70)]


async def test_in_a_long_arm_the_load_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    now = 1000.0

    class Busy:
        answer_bytes = 0

        async def load(self) -> Load:
            asked.append(now)
            return Load(running=1, queued=0, used_tokens=1)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    look = from_load(Busy(), lambda _load: None)  # type: ignore[arg-type]
    for step in range(400):
        now = 1000.0 + step / 4
        await look()
    pauses = np.diff(asked)
    assert (pauses[0], pauses[-1]) == (1.0, 2.0)
    assert len(asked) == 57


async def test_a_server_that_works_on_nothing_is_said_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK_EVERY_S", 0.0)
    minutes = itertools.count(step=60)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(minutes))))
    ended: list[str] = []
    stalled: list[str] = []

    class Wedged(FakeServer):
        async def generate(self, *_: Any, **how: Any) -> list[Generated]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(how["rids"][0])
            raise AssertionError

    class Stalled(_Silent):
        def arm_stalled(self, arm: str, silent_s: float) -> None:
            assert silent_s > 180
            stalled.append(arm)

    async def nothing() -> Seen:
        return Seen(0)

    with pytest.raises(DeadlineError, match="no progress in the generation arm"):
        await run(Wedged(), "match", observe=Stalled(), options=ArmOptions(look=lambda _: nothing))
    assert len(ended) == 1
    assert stalled == ["generation"] * 7


async def test_prefill_cache_hit_warms_the_cache_and_drops_what_missed_it() -> None:
    server = FakeServer(cached=(0, 3))
    columns = await run(server, "prefill_cache_hit")
    assert server.calls == [
        ("flush",),
        ("warming", PROMPTS, 0, -1),
        ("generation", PROMPTS, 2, -1),
        ("flush",),
        ("scoring", [[4, 5, 6, 7, 100, 101]], 0, 0),
    ]
    assert columns.dropped.tolist() == [True, False]
    assert columns.start.tolist() == [0, 0, 2]
    assert columns.output_len.tolist() == [2, 2]


async def test_decode_cache_hit_continues_with_a_comma_and_must_hit_generated_tokens() -> None:
    # A hit of prompt + 1 tokens restores nothing that was generated: it counts as a miss.
    server = FakeServer(cached=(4, 6))
    columns = await run(server, "decode_cache_hit")
    second = [[1, 2, 3, 100, 101, COMMA], [4, 5, 6, 7, 100, 101, COMMA]]
    assert server.calls == [
        ("flush",),
        ("warming", PROMPTS, 2, -1),
        ("tokenize", ","),
        ("generation", second, 2, -1),
        ("flush",),
        ("scoring", [[*second[1], 100, 101]], 0, 0),
    ]
    assert columns.dropped.tolist() == [True, False]
    assert columns.prompt_len.tolist() == [6, 7]
    assert columns.prompt_ids.tolist() == second[0] + second[1]


async def test_a_separator_id_stands_for_the_comma_where_there_is_no_tokenizer() -> None:
    server = FakeServer(cached=(5, 6))
    await run(server, "decode_cache_hit", options=ArmOptions(separator_ids=(9, 10)))
    assert ("tokenize", ",") not in server.calls
    assert server.calls[2][1][0] == [1, 2, 3, 100, 101, 9, 10]


async def test_without_any_hit_nothing_is_scored() -> None:
    columns = await run(server := FakeServer(), "prefill_cache_hit")
    assert columns.dropped.all()
    assert [call[0] for call in server.calls] == ["flush", "warming", "generation", "flush"]


async def test_a_capture_repeats_the_measured_sequences_with_a_cut_generation() -> None:
    measured = await run(FakeServer(cached=(5, 6)), "decode_cache_hit")
    # Another hit count must not change who is compared.
    server = FakeServer(cached=(0, 6))
    cut = await run(server, "decode_cache_hit", measured=measured, generation_tokens=1)
    assert server.calls[1][2] == 2, "the first turn stays whole"
    assert server.calls[3][2] == 1
    assert server.calls[5][1][0] == [1, 2, 3, 100, 101, COMMA, 100, 101], "whole sequences are scored"
    assert cut.dropped.tolist() == [False, False]
    assert cut.token_id.tolist() == [100, 100]
    assert cut.prefill_nats.tolist() == [-100 / 64] * 2


async def test_a_server_that_does_not_repeat_itself_is_not_compared() -> None:
    measured = await run(FakeServer(), "match")
    other = replace(measured, token_id=measured.token_id + 1)
    with pytest.raises(UndecidedError, match="did not repeat"):
        await run(FakeServer(), "match", measured=other)


@pytest.mark.parametrize(
    ("helper", "what", "cached"),
    [("match", "token_id", (0, 3)), ("decode_cache_hit", "prompt_ids", (0, 6))],
)
async def test_one_that_need_not_repeat_itself_is_compared_with_itself(
    helper: Any, what: str, cached: tuple[int, int]
) -> None:
    alone = await run(FakeServer(cached=cached), helper)
    measured = replace(alone, **{what: getattr(alone, what) + 1}, dropped=np.zeros_like(alone.dropped))
    with pytest.raises(NotRepeatedError):
        await run(FakeServer(cached=cached), helper, measured=measured)

    server = FakeServer(cached=cached)
    columns = await run(server, helper, measured=measured, must_repeat=False, generation_tokens=1)

    # What it generated is scored, and no more; who missed the cache this time is dropped.
    scored = next(call[1] for call in server.calls if call[0] == "scoring")
    assert [len(sequence) for sequence in scored] == [
        length + 1 for length, dropped in zip(alone.prompt_len, alone.dropped, strict=True) if not dropped
    ]
    assert columns.dropped.tolist() == alone.dropped.tolist()


def changed(arm: str, **fields: Any) -> Any:
    return lambda at, answer: replace(answer, **fields) if at == arm else answer


@pytest.mark.parametrize(
    ("mend", "words"),
    [
        (changed("generation", output_ids=[5, 6]), "do not belong to its output"),
        (changed("generation", output_logprobs=None), "no logprobs"),
        (changed("generation", output_ids=[], output_logprobs=logprobs([], [])), "generated nothing"),
        (changed("generation", output_ids=[1, 2, 3]), "3 tokens, 2 were asked for"),
        (losing("generation", keeping=slice(0, 1)), "2 output tokens, 1 logprobs"),
        (losing("generation", keeping=slice(0, 0)), "2 output tokens, 0 logprobs"),
        (losing("generation", retractions=0), "do not belong to its output"),
        (changed("generation", cached_tokens=None), "how many tokens came from its cache"),
        (changed("generation", cached_tokens=99), "99 cached tokens"),
        (changed("generation", rid="other"), "carries another id"),
        (changed("generation", finish_reason="abort: out of memory"), "aborted request 0"),
        (changed("scoring", input_logprobs=None), "do not belong to its tokens"),
        (
            changed("scoring", input_logprobs=logprobs([1, 2, 3, 100, 7], [np.nan, *[-1] * 4])),
            "do not belong",
        ),
        (
            changed("scoring", input_logprobs=logprobs([1, 2, 3, 100, 101], [-1.0] * 5)),
            "are shifted",
        ),
        (
            changed("generation", output_logprobs=logprobs([100, 101], [-0.1, -1.0])),
            "no float32 values",
        ),
    ],
    ids=[
        "other-output", "no-logprobs", "nothing-generated", "too-much-generated", "last-lost",
        "all-lost", "first-lost-without-a-retraction", "hits-not-said",
        "too-many-hits", "other-id", "aborted", "not-scored", "other-tokens-scored", "shifted", "no-float32",
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_compared_is_refused(mend: Any, words: str) -> None:
    with pytest.raises(UndecidedError) as refused:
        await run(FakeServer(mend=mend), "match")
    assert words in f"{refused.value.what}: {refused.value.why}"


async def test_a_logprob_that_is_no_number_is_kept_as_one() -> None:
    mend = changed("generation", output_logprobs=logprobs([100, 101], [np.nan, -1.0]))
    columns = await run(FakeServer(mend=mend), "match")
    assert np.isnan(columns.decode_nats).tolist() == [True, False, True, False]


async def test_the_observer_hears_each_arm_begin_and_end() -> None:
    heard: list[Any] = []

    class Observer:
        def arm_started(self, *what: Any) -> None:
            heard.append(("started", *what))

        def arm_progress(self, arm: str, done: int, total: int, *_: Any) -> None:
            heard.append(("progress", arm, done, total))

        def arm_stalled(self, *_: object) -> None: ...

        def arm_ended(self, arm: str, elapsed_s: float) -> None:
            heard.append(("ended", arm, elapsed_s >= 0))

    await run(FakeServer(), "match", observe=Observer())
    assert heard == [
        ("started", "generation", 2, 7 + 4),
        ("progress", "generation", 11, 11),
        ("ended", "generation", True),
        ("started", "scoring", 2, 11),
        ("progress", "scoring", 11, 11),
        ("ended", "scoring", True),
    ]


def test_progress_is_counted_from_the_servers_batch_lines() -> None:
    counter = TokenCounter(decode_interval=40)
    for line in (
        "[x] Prefill batch, #new-seq: 2, #new-token: 100, #cached-token: 28, token usage: 0.0",
        "[x] Prefill batch [7], #new-seq: 1, #new-token: 5, #cached-token: 0",
        "[x] Decode batch, #running-req: 3, #token: 17372, gen throughput (token/s): 648.00",
        "[x] INFO: 127.0.0.1 POST /generate 200 OK",
    ):
        counter.feed(line)
    assert counter.tokens == 100 + 28 + 5 + 3 * 40


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_widened_prompt_keeps_its_prefix_and_nothing_more(kept: int) -> None:
    prompt = [7, 7, 3, 7, 9]
    wider = Widen([0, kept], 12).wider(prompt, 1)
    assert wider[:kept] == prompt[:kept]
    assert len(wider) == kept + 12
    assert wider[kept] != prompt[kept]
    assert set(wider) <= set(prompt)


def test_a_prompt_of_one_token_cannot_be_widened() -> None:
    with pytest.raises(UndecidedError, match="request 0 cannot be widened"):
        Widen([3], 4).wider([5, 5, 5, 5], 0)
