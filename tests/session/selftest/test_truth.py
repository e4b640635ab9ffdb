"""Where a fault's origin must begin, by the rules of the catalogue."""

from dataclasses import replace

import numpy as np
import pytest

from klbench.core.columns import HELPERS, HelperColumns
from klbench.engine.compositions import Composition, Part
from klbench.insitu.faults_catalogue import parse_fault
from klbench.insitu.rids import RequestId
from klbench.session.selftest.truth import first_position, touched, truth_of

PROMPT, OUTPUT, CACHED, PASS = 90, 10, 80, 3


def _columns() -> HelperColumns:
    one = np.array([0])
    return HelperColumns(
        helper="match",
        prompt_len=np.array([PROMPT]),
        cached_generation=np.array([CACHED]),
        cached_scoring=one,
        output_len=np.array([OUTPUT]),
        dropped=np.array([False]),
        start=np.array([0, OUTPUT]),
        token_id=np.zeros(OUTPUT, dtype=np.int32),
        decode_nats=np.zeros(OUTPUT, dtype=np.float32),
        prefill_nats=np.zeros(OUTPUT, dtype=np.float32),
        prompt_start=np.array([0, PROMPT]),
        prompt_ids=np.zeros(PROMPT, dtype=np.int32),
    )


def _forward(number: int, arm: str, first: int, rows: int, others: int = 0) -> Composition:
    rid = RequestId("a1b2", PASS, arm, True, 0)
    phase = "decode" if rows == 1 else "chunk" if first else "extend"
    part = Part(rid, first, rows, first, first + rows, phase)
    return Composition(number, phase, rows + others, (part,))


COLD = [
    _forward(1, "generation", 0, PROMPT),
    *(_forward(2 + step, "generation", PROMPT + step, 1, 3) for step in range(OUTPUT - 1)),
    _forward(20, "scoring", 0, PROMPT + OUTPUT - 1),
]
CHUNKED = [_forward(1, "generation", 0, 64), _forward(2, "generation", 64, 26), *COLD[1:]]


@pytest.mark.parametrize(
    ("fault", "forwards", "expected"),
    [
        ("o_proj-rows", COLD, 90),
        # The second chunk is a call of 26 rows; scoring has them in one of 99.
        ("o_proj-rows", CHUNKED, 64),
        ("o_proj-rows:rows=200", COLD, None),
        ("lm_head-rows", COLD, 89),
        ("lm_head-rows", CHUNKED, 89),
        ("attention-blocks:block=95", COLD, 95),
        ("attention-blocks", COLD, 90),
        ("window-short", COLD, 90),
        ("decode-window:after=4", COLD, 94),
        ("key-write:step=4", COLD, 93),
        ("interval-write", COLD, 96),
        ("restore-key", COLD, 80),
        # 90 rows are in half tile 0 of 96 and 99 in half tile 1: exactly one is odd.
        ("attention-prompt:tile=192", COLD, 0),
        ("attention-prompt:tile=4096", COLD, None),
        # Chunks of 64 and 26 rows against one of 99: halves 2 and 0 (even) against 3 (odd).
        ("attention-prompt:tile=64", CHUNKED, 0),
        # With half a tile of 20 rows: 3 (odd) and 1 (odd) against 4 (even).
        ("attention-prompt:tile=40", CHUNKED, 0),
        # With half a tile of 12: 5 (odd) and 2 (even) against 8 (even).
        ("attention-prompt:tile=24", CHUNKED, 0),
        # With half a tile of 8: 8 (even) and 3 (odd) against 12 (even).
        ("attention-prompt:tile=16", CHUNKED, 64),
        ("race", COLD, None),
        # Decode calls have 4 rows, and are filled up.
        ("padding-scale", COLD, 90),
        ("padding-scale:pad=4", COLD, None),
        # Cut at 64 when it is generated, and nowhere when it is scored.
        ("chunk-key", CHUNKED, 64),
        ("chunk-key", COLD, None),
        # 90 rows are split at row 45, 99 at row 49: row 45 is split in one arm only.
        ("attention-split", COLD, 45),
        # Chunks of 64 and 26 rows are split at rows 32 and 77.
        ("attention-split", CHUNKED, 32),
        ("batch-scale", COLD, None),
    ],
)
def test_the_first_row_follows_from_the_forwards(
    fault: str, forwards: list[Composition], expected: int | None
) -> None:
    first = first_position(parse_fault(fault), _columns(), 0, forwards, PASS)
    assert first.position == expected
    assert expected is None or (first.allows(expected) and not first.allows(expected + 1))


@pytest.mark.parametrize("fault", ["window-short", "window-long", "window-evict", "attention-blocks"])
@pytest.mark.parametrize(("prompt", "expected"), [(17, 64), (63, 64), (64, 64), (65, 65)])
def test_a_window_of_64_rows_is_first_crossed_by_row_64(fault: str, prompt: int, expected: int) -> None:
    columns = replace(_columns(), prompt_len=np.array([prompt]))
    assert first_position(parse_fault(fault), columns, 0, COLD, PASS).position == expected


def test_equal_splits_give_no_row() -> None:
    """Both arms extend the same 90 rows, and the decoded ones are summed at once in one arm and split nowhere
    in the other."""
    same = [COLD[0], _forward(20, "scoring", 0, PROMPT)]
    assert first_position(parse_fault("attention-split"), _columns(), 0, same, PASS).position is None


@pytest.mark.parametrize(("offset", "expected"), [(0, 89), (3, 92), (None, None)])
def test_another_log_of_softmax_begins_at_the_first_token_with_two_logprobs(
    offset: int | None, expected: int | None
) -> None:
    prefill = np.zeros(OUTPUT, dtype=np.float32)
    if offset is not None:
        prefill[[offset, OUTPUT - 1]] = 1e-7
    columns = replace(_columns(), prefill_nats=prefill)
    assert first_position(parse_fault("log-of-softmax"), columns, 0, COLD, PASS).position == expected


def test_a_cold_request_that_another_restore_reaches_has_no_rule() -> None:
    columns = replace(_columns(), cached_generation=np.array([0]))
    assert first_position(parse_fault("restore-key"), columns, 0, COLD, PASS).position is None


def _restored(*prefixes: int) -> Composition:
    parts = tuple(
        Part(RequestId("a1b2", PASS, "generation", False, request), prefix, 1, prefix, prefix + 1, "restored")
        for request, prefix in enumerate(prefixes)
    )
    return Composition(1, "extend", len(parts), parts)


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        ("restore-key", {0, 1, 2, 3}),
        ("restore-residue", {1, 3}),
        ("restore-residue:modulus=4,residue=1", {0}),
        ("restore-not-first", {1, 2, 3}),
        ("restore-not-first:spared=3", {3}),
    ],
)
def test_a_fault_of_the_restore_reaches_the_hits_that_it_chooses(fault: str, requests: set[int]) -> None:
    forwards = [_restored(81, 90, 75, 64), *COLD]
    assert touched([parse_fault(fault)], forwards, PASS) == requests
    assert touched([parse_fault(fault)], forwards, PASS + 1) == frozenset()


def test_other_faults_choose_no_requests() -> None:
    assert touched([parse_fault("key-write")], [_restored(81)], PASS) is None
    assert touched([parse_fault("restore-key"), parse_fault("key-write")], [_restored(81)], PASS) is None


@pytest.mark.parametrize(
    ("fault", "by_chance"), [("race", True), ("race:odds=2", True), ("o_proj-rows", False)]
)
def test_only_a_race_may_pass_a_helper_by(fault: str, by_chance: bool) -> None:
    truth = truth_of(fault, None, {"match": _columns()}, COLD, PASS)
    assert truth.by_chance is by_chance
    assert truth.dirty == frozenset(HELPERS)
