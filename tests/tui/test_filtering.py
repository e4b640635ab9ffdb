"""The filter line: what it finds is what it says, whatever the columns hold; what it cannot read it names."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klbench.tui.filtering import FilterError, Term, arranged, check, parse, rows_that_pass, search_by_value
from klbench.tui.widgets.rows import Column, Rows

TEXTS = ["the", " the", "[/INST]", 'a "quote"', "的", "x" * 30, "\x1b[31m"]


def rows(kl, pos, tokens) -> Rows:
    kl, pos, tokens = np.asarray(kl, float), np.asarray(pos), np.asarray(tokens)
    columns = (
        Column("kl", "kl", 8, lambda r: str(kl[r]), kl),
        Column("position", "pos", 5, lambda r: str(pos[r]), pos),
        Column("token", "token", 9, lambda r: TEXTS[tokens[r]], names=("tok",),
               search=search_by_value(tokens, TEXTS.__getitem__)),
        Column("note", "note", 9, lambda r: "first" if r == 0 else ""),
    )  # fmt: skip
    return Rows(columns, len(kl))


SOME = rows([0.0, 1e-4, 2e-3, np.nan, 5.0], [96, 97, 98, 97, 200], [0, 1, 2, 3, 4])


def found(text: str, among: Rows = SOME) -> list[int]:
    terms = parse(text)
    check(among, terms)
    return np.flatnonzero(rows_that_pass(among, terms)).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("kl>1e-3", [2, 4]),
        ("kl>=2e-3 pos:98", [2]),
        ("kl:0", [0]),
        ("kl!=0", [1, 2, 3, 4]),
        ("kl:nan", [3]),
        ("-kl>1e-3", [0, 1, 3]),
        ("pos:97", [1, 3]),
        ("pos:97..98", [1, 2, 3]),
        ("POS=97 Kl<1", [1]),
        ("tok:the", [0, 1]),
        ('tok:" the"', [1]),
        ("tok:[/inst]", [2]),
        (r'tok:"a \"quote\""', [3]),
        ("tok:的", [4]),
        ("-tok:the", [2, 3, 4]),
        ("tok!=the", [2, 3, 4]),
        ("first", [0]),
        ("note:first kl<1", [0]),
        ("kl>100", []),
    ],
)
def test_a_filter_finds_what_it_says(text, expected):
    assert found(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("klx>1", "no column klx: did you mean kl?"),
        ("zebra:1", "There are kl, position, token, note"),
        ("kl>1e-", "'1e-' is no number"),
        ("kl>", "what should kl be"),
        ("pos:97..x", "'x' is no number"),
        ("pos>97..98", "a range goes with a colon"),
        ('tok:"the', "does not end"),
        ("tok>the", "tok is text"),
    ],
)
def test_what_cannot_be_read_is_named(text, says):
    with pytest.raises(FilterError, match=re.escape(says)):
        check(SOME, parse(text))


@given(st.text(max_size=60))
def test_any_line_is_read_or_refused_with_words(text):
    try:
        terms = parse(text)
        check(SOME, terms)
    except FilterError as error:
        refusal = str(error)
    else:
        refusal = "not refused"
        assert rows_that_pass(SOME, terms).shape == (SOME.count,)
    assert len(refusal) > 10


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=40),
    st.sampled_from([">", "<", ">=", "<=", "=", "!="]),
    st.floats(-10, 10),
)
def test_a_term_and_its_negation_divide_the_rows(values, op, number):
    some = rows(values, np.zeros(len(values), int), np.zeros(len(values), int))
    met = rows_that_pass(some, [Term("kl", op, repr(number), False)])
    unmet = rows_that_pass(some, [Term("kl", op, repr(number), True)])
    assert np.array_equal(met, ~unmet)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), min_size=1, max_size=60))
def test_filter_then_sort_is_a_stable_order_of_the_rows_that_pass(pairs):
    some = rows([p[0] for p in pairs], [p[1] for p in pairs], [0] * len(pairs))
    order = arranged(some, None, some.columns[1], False, parse("kl>0.5"))
    expected = sorted((i for i, p in enumerate(pairs) if p[0] > 0.5), key=lambda i: pairs[i][1])
    assert order.tolist() == expected
