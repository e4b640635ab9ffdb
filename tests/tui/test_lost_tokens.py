"""A token whose logprob the server lost stands in every table, is called nothing but that, and is nowhere
equal, different or not a number."""

from dataclasses import replace

import numpy as np
import pytest
import recorded
from pilots import press, screen_text, settle, workbench

from klbench.cli import plain_words
from klbench.core.kl import helper_result
from klbench.session.columns import save_columns
from klbench.session.state import HelperState
from klbench.tui.compare_tables import all_token_rows, all_tokens, beside, beside_rows
from klbench.tui.measurement import measure
from klbench.tui.screens.distribution import tail_of
from klbench.tui.screens.tokens import describe_shape
from klbench.tui.tables import request_rows, token_rows
from klbench.tui.widgets.strip import NOT_COMPARED, bars, pooled
from klbench.tui.wording import helper_line

HELPER = "prefill_cache_hit"
FIRST = recorded.first_dirty(HELPER)
LAST = recorded.SAMPLES * recorded.NEW_TOKENS


def losing(*requests, dirty=True):
    """The recorded measurement, with the first logprob of these requests lost."""
    whole = recorded.columns(HELPER, dirty=dirty)
    decode, lost = whole.decode_nats.copy(), np.zeros(whole.requests, np.bool_)
    decode[whole.start[list(requests)]] = np.nan
    lost[list(requests)] = True
    return measure(1, replace(whole, decode_nats=decode, lost=lost))


def cells(rows, row):
    return {column.key: column.show(row) for column in rows.columns}


def test_the_table_of_tokens_says_what_it_is_and_shows_no_number_for_it():
    shown = cells(token_rows(losing(FIRST), FIRST), 0)
    assert [shown[name] for name in ("decode", "delta", "k3")] == ["–"] * 3
    assert shown["prefill"].startswith("-")
    assert shown["note"] == "lost"
    assert cells(token_rows(losing(FIRST), FIRST), 1)["note"] == "first"
    assert cells(token_rows(losing(), FIRST), 0)["note"] == "first"


def test_requests_and_all_tokens_count_it_as_not_compared():
    measured = losing(FIRST)
    new = recorded.NEW_TOKENS
    assert measured.compared[FIRST] == new - 1
    assert cells(request_rows(measured), FIRST)["differ"].endswith(f"/{new - 1}")
    tokens = all_tokens([measured])
    place = int(measured.columns.start[FIRST])
    assert len(tokens.offset) == LAST
    assert (int(tokens.request[place]), int(tokens.offset[place])) == (FIRST, 0)
    rows = all_token_rows(tokens)
    assert [cells(rows, place)[name] for name in ("delta", "k3", "decode")] == ["–"] * 3
    assert rows.tone(place) == ""
    assert cells(rows, place + 1)["decode"] != "–"


def test_beside_another_session_it_is_in_neither_s_favour():
    pair = beside(losing(FIRST), FIRST, losing(), FIRST)
    shown = cells(beside_rows(pair), 0)
    assert (shown["decode"], shown["delta"], shown["differ"]) == ("–", "–", "lost")
    assert shown["rdecode"] != "–"
    assert shown["prefill"] != "–"
    assert 0 not in pair.only_one


def test_the_tail_does_not_hold_it():
    clean = tail_of(losing(FIRST, dirty=False))
    assert [tokens for _, tokens, *_ in clean] == [0] * len(clean)
    with_one, whole = tail_of(losing(FIRST)), tail_of(losing())
    assert with_one[0][1] == whole[0][1] - 1
    assert with_one[0][2] == pytest.approx((whole[0][1] - 1) / (LAST - 1))


def test_the_strip_draws_a_dash():
    assert bars(np.asarray([NOT_COMPARED, 0.0, 1.0])) == "–·█"
    assert bars(np.asarray([NOT_COMPARED, 0.0])) == "–·"
    assert bars(pooled(np.asarray([NOT_COMPARED, 1.0, 0.0, 0.0]), 2)) == "█·"


def test_the_shape_of_the_rest_is_told_without_guessing_at_it():
    from_second = describe_shape(losing(FIRST), FIRST)
    assert from_second[0].startswith("It shows from the first token on that was compared, in ")
    assert "is not known" in from_second[1]
    clean = int(np.flatnonzero(~(losing().differing > 0))[0])
    assert describe_shape(losing(clean), clean)[0].startswith(
        "Every token but the first, whose logprob the server lost, has the same logprob in both arms"
    )
    columns = losing(0).columns
    only = replace(
        columns,
        start=np.r_[0, np.ones(recorded.SAMPLES, np.int64)],
        **{name: getattr(columns, name)[:1] for name in ("token_id", "decode_nats", "prefill_nats")},
    )
    assert describe_shape(measure(1, only), 0) == [
        "Nothing of this request was compared: the server lost its only logprob."
    ]


def test_lines_of_a_helper_and_of_its_tokens_name_it():
    measured = losing(FIRST)
    helper = HelperState(helper=HELPER, result=helper_result(measured.columns))
    assert helper_line(helper, 0.0, 120).endswith("1 lost")
    said = plain_words.tokens(measured, FIRST, 2)
    assert said[-2] == "offset 0 was not compared: the server lost its logprob"
    assert f"of {recorded.NEW_TOKENS - 1} tokens differ" in said[0]
    assert not any("nan" in line.lower() for line in said)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_screen_of_tokens_shows_it(size, finished):
    measured = losing(FIRST)
    save_columns(finished / "runs" / f"1-{HELPER}.npz", measured.columns)
    async with workbench(finished, size=size) as (app, pilot):
        await press(pilot, "enter")
        app.screen.query_one("TokenView").table.move_to_key(0)
        await settle(pilot)
        shown = screen_text(app)
        assert app.screen.place == "tokens"
        assert "offset 0, its logprob was lost by the server" in shown
        assert "NaN" not in shown
        assert f"in {int(measured.differing[FIRST])} of {recorded.NEW_TOKENS - 1}." in shown


@pytest.mark.parametrize(
    ("key", "said"),
    [("t", ", 1 not compared: the server lost a logprob."), ("d", f"of {LAST - 1} tokens")],
)
async def test_the_screens_of_all_tokens_count_it_apart(key, said, finished):
    save_columns(finished / "runs" / f"1-{HELPER}.npz", losing(FIRST).columns)
    async with workbench(finished, size=(160, 45)) as (_app, pilot):
        shown = " ".join((await press(pilot, key)).split())
        assert said in shown
        assert "NaN" not in shown
