"""Rows pair by request and position, with proof or with the reason why not."""

import dataclasses

import numpy as np
from little_transformer import Model, run_match, run_prefill_cache_hit

from klbench.core.alignment import Alignment, align
from klbench.core.localisation import localise
from klbench.core.trace import Arm, Phase, Trace

PROMPT = 6
TOKENS = [4, 9, 2, 7, 7, 1, 3, 8, 5, 6]


def matched(chunk: int | None = None) -> Trace:
    model = Model(2)
    run_match(model, TOKENS, PROMPT, chunk)
    return model.trace()


def refused(alignment: Alignment) -> str:
    assert not alignment.proved
    assert alignment.reason is not None
    assert alignment.as_dict()["proved"] is False
    return alignment.reason


def test_prefill_and_decode_rows_pair_with_the_scoring_rows_of_their_positions() -> None:
    found = align(matched(), 0)

    assert found.proved
    assert found.pairs.position.tolist() == list(range(len(TOKENS) - 1))
    assert found.pairs.phase.tolist() == [Phase.EXTEND] * PROMPT + [Phase.DECODE] * 3
    assert found.as_dict() == {"proved": True, "rows": 9, "reason": None}


def test_chunks_of_a_prefill_pair_like_the_whole() -> None:
    found = align(matched(chunk=4), 0)

    assert found.proved
    assert found.pairs.phase.tolist()[3:6] == [Phase.EXTEND, Phase.CHUNK, Phase.CHUNK]


def test_a_position_computed_in_both_arms_of_the_decode_side_pairs_twice_in_the_order_of_time() -> None:
    model = Model(2)
    run_prefill_cache_hit(model, TOKENS, PROMPT)
    found = align(model.trace(), 0)

    twice = found.pairs.position == PROMPT - 1
    assert found.pairs.arm[twice].tolist() == [Arm.WARMING, Arm.GENERATION]
    assert found.pairs.phase[twice].tolist() == [Phase.EXTEND, Phase.RESTORED]


def test_rows_computed_again_after_a_retraction_pair_and_blame_nobody() -> None:
    model = Model(2)
    model.extend(Arm.GENERATION, TOKENS[:PROMPT], 0, Phase.EXTEND)
    model.decode(Arm.GENERATION, TOKENS[PROMPT], PROMPT)
    model.flush()
    model.extend(Arm.GENERATION, TOKENS[: PROMPT + 2], 0, Phase.RESUMED)
    model.decode(Arm.GENERATION, TOKENS[PROMPT + 2], PROMPT + 2)
    model.flush()
    model.extend(Arm.SCORING, TOKENS, 0, Phase.EXTEND)
    trace = model.trace()
    found = align(trace, 0)

    assert found.proved
    assert (found.pairs.position == 0).sum() == 2
    assert localise(trace, [found], np.zeros(0, dtype=np.int64)).findings == ()


def test_rows_beyond_the_end_of_the_request_are_left_out_and_counted() -> None:
    found = align(matched(), 0, last_position={Arm.GENERATION: 7})

    assert found.proved
    assert found.beyond_end == 1
    assert found.pairs.position.max() == 7


def test_rows_that_scoring_did_not_compute_are_counted() -> None:
    model = Model(1)
    run_match(model, TOKENS, PROMPT)
    model.decode(Arm.GENERATION, 1, len(TOKENS) - 1)
    model.decode(Arm.GENERATION, 1, len(TOKENS))
    found = align(model.trace(), 0)

    assert found.unpaired == 1


def test_another_token_at_a_position_refuses_with_both_tokens() -> None:
    trace = matched()
    token = trace.row_token.copy()
    token[np.flatnonzero((trace.row_arm == Arm.SCORING) & (trace.row_position == 7))] = 99
    reason = refused(align(dataclasses.replace(trace, row_token=token), 0))

    assert "position 7" in reason
    assert "token 8" in reason
    assert "token 99" in reason


def test_another_embedding_refuses_with_its_position() -> None:
    trace = matched()
    tensor = next(
        t
        for t in range(len(trace.tensor_forward))
        if trace.operators[trace.tensor_operator[t]].module == "model.embed_tokens"
        and trace.tensor_direction[t] == 1
    )
    digest = trace.digest.copy()
    digest[trace.tensor_start[tensor] + 3] ^= np.uint64(1)

    reason = refused(align(dataclasses.replace(trace, digest=digest), 0))

    assert "position 3" in reason
    assert "embedding" in reason


def test_an_embedding_that_was_not_observed_refuses() -> None:
    trace = matched()
    operators = tuple(
        dataclasses.replace(op, class_name="Module", module="model.table")
        if op.module == "model.embed_tokens"
        else op
        for op in trace.operators
    )

    assert "not observed" in refused(align(dataclasses.replace(trace, operators=operators), 0))


def test_an_invalid_capture_and_an_absent_request_refuse() -> None:
    assert "no space" in refused(align(dataclasses.replace(matched(), invalid="no space left"), 0))
    assert "request 4" in refused(align(matched(), 4))


def test_a_tensor_of_another_type_in_one_arm_is_not_observed_and_not_equal() -> None:
    trace = matched()
    dtype = trace.tensor_dtype.copy()
    scoring = trace.row_arm[trace.tensor_row[trace.tensor_start]] == Arm.SCORING
    number = next(i for i, op in enumerate(trace.operators) if op.module == "model.layers.0.up")
    dtype[scoring & (trace.tensor_operator == number)] = 1
    found = align(dataclasses.replace(trace, tensor_dtype=dtype, dtypes=("int64", "float32")), 0)

    assert set(found.comparison.status[found.comparison.operator == number].ravel().tolist()) == {1}
    assert found.proved
