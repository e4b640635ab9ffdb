"""Answers of /generate, cut anywhere, are decoded one by one; what is no answer is refused."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.engine.answers import AnswerStream
from klbench.errors import UndecidedError

TEXTS = st.text(st.sampled_from('{}[]"\\,: é\n') | st.characters(codec="utf-8"), max_size=12)


def answer(index, text="", entries=3):
    logprobs = [[-0.5 * place, place, None] for place in range(entries)]
    meta = {"id": f"r{index}", "cached_tokens": index, "output_token_logprobs": logprobs}
    return {"text": text, "output_ids": list(range(entries)), "meta_info": meta}


def decoded(parts, expected):
    stream = AnswerStream(expected)
    for part in parts:
        stream.feed(part)
    return stream.finish()


@given(
    texts=st.lists(TEXTS, max_size=4),
    sizes=st.lists(st.integers(0, 40), max_size=60),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_answers_are_the_same_however_the_response_is_cut(texts, sizes, indent, ascii_only):
    sent = [answer(index, text) for index, text in enumerate(texts)]
    body = json.dumps(sent, indent=indent, ensure_ascii=ascii_only).encode()
    parts, at = [], 0
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    found = decoded([*parts, body[at:]], len(texts))
    assert [one.rid for one in found] == [f"r{index}" for index in range(len(texts))]
    assert [one.cached_tokens for one in found] == list(range(len(texts)))
    for one in found:
        assert one.output_ids == [0, 1, 2]
        assert one.output_logprobs is not None
        assert one.output_logprobs.nats.tolist() == [0.0, -0.5, -1.0]


WHOLE = json.dumps([answer(0), answer(1)])


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[",
        WHOLE[:-1],
        WHOLE[1:],
        WHOLE[: len(WHOLE) // 2],
        WHOLE + "]",
        WHOLE + WHOLE,
        WHOLE.replace("}, {", "} {"),
        WHOLE.replace("}, {", "}, 7, {"),
        WHOLE.replace('"r0"', '"r0'),
        "[" + json.dumps(answer(0)) + ", " + '{"error": "out of memory"}' + "]",
        json.dumps({"error": {"message": "no"}}),
        json.dumps(answer(0)),
        json.dumps([[answer(0)], [answer(1)]]),
        '[{"meta_info": {}}, {"meta_info": {"id": 7}}]',
        WHOLE.replace("[0, 1, 2]", "[0, 1, 2147483648]", 1),
        WHOLE.replace("[-0.5, 1, null]", "[-0.5, -1, null]", 1),
        WHOLE.replace("[-0.5, 1, null]", "[-0.5, 18446744073709551616, null]", 1),
        "[" * 100_000,
        "[" + '{"meta_info":' * 100_000,
    ],
)
def test_what_is_no_list_of_two_answers_is_refused(body):
    with pytest.raises(UndecidedError):
        decoded([body.encode()], 2)


def test_another_number_of_answers_is_refused():
    with pytest.raises(UndecidedError, match="answered 2 of 3"):
        decoded([WHOLE.encode()], 3)


def test_a_nan_of_one_answer_is_counted_and_the_others_are_read():
    text = WHOLE.replace("-0.5,", "NaN,", 1)
    first, second = decoded([text.encode()], 2)
    assert first.output_logprobs is not None
    assert second.output_logprobs is not None
    assert (first.output_logprobs.missing, second.output_logprobs.missing) == (1, 0)


def test_the_response_is_never_whole_in_memory():
    size = 100_000
    one = json.dumps(answer(0, "x" * size))
    stream = AnswerStream(40)
    tracemalloc.start()
    try:
        stream.feed(b"[")
        for number in range(40):
            body = (one + ("]" if number == 39 else ",")).encode()
            for at in range(0, len(body), 4096):
                stream.feed(body[at : at + 4096])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stream.finish()) == 40
    assert peak < 10 * size
