"""Text that is safe to show: nothing that acts on a terminal survives, and widths are never wrong."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from klbench.core import text

ANY = st.text(alphabet=st.characters(), max_size=60)


@given(ANY)
def test_nothing_that_acts_on_a_terminal_survives(raw):
    for character in text.visible(raw):
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@given(ANY)
def test_making_visible_twice_is_making_visible_once(raw):
    once = text.visible(raw)
    assert text.visible(once) == once


@given(ANY)
def test_a_visible_text_is_as_wide_as_the_terminal_library_says(raw):
    shown = text.visible(raw)
    assert text.cell_width(shown) == cell_len(shown)


@given(ANY, st.integers(0, 40), st.booleans())
def test_fitted_text_takes_exactly_the_asked_cells(raw, width, right):
    assert text.cell_width(text.fit(text.visible(raw), width, right=right)) == width


@given(ANY, st.integers(0, 40))
def test_text_that_ends_with_a_whole_word_takes_exactly_the_asked_cells(raw, width):
    assert text.cell_width(text.fit_words(text.visible(raw), width)) == width


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=2, max_size=12), st.integers(24, 40))
def test_a_sentence_is_cut_behind_a_whole_word(words, width):
    whole = " ".join(words)
    shown = text.fit_words(whole, width).rstrip()
    if len(whole) <= width:
        assert shown == whole
    else:
        kept = shown.removesuffix(" …").split(" ")
        assert shown.endswith(" …")
        assert kept == words[: len(kept)]
        assert len(" ".join(words[: len(kept) + 1])) + 2 > width  # no further word had room


def test_a_word_that_is_longer_than_its_cell_is_cut():
    assert text.fit_words("self_attn.qkv_proj differs", 8) == "self_at…"


@given(ANY, st.integers(8, 60))
def test_wrapped_lines_fit_and_lose_no_word(raw, width):
    shown = text.visible(raw)
    lines = text.wrap(shown, width, indent="  ")
    assert all(text.cell_width(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(shown.split())


def test_a_path_that_is_longer_than_a_line_breaks_behind_a_slash():
    lines = text.wrap("written: /home/me/sessions/20261130-demo/reports/report-1.html", 30, indent="  ")
    assert lines == ["written: /home/me/sessions/", "  20261130-demo/reports/", "  report-1.html"]


@pytest.mark.parametrize(
    ("width", "more", "shown"),
    [
        (40, "", "0 of 128 differ · divergent first"),
        (32, "", "0 of 128 differ"),
        (32, " · …", "0 of 128 differ · …"),
        (18, " · …", "0 of 128 differ"),
        (9, "", "0 of 128…"),
    ],
)
def test_a_title_shortens_by_whole_parts_and_only_the_first_is_cut(width, more, shown):
    assert text.shortened("0 of 128 differ · divergent first", width, more=more) == shown


def test_every_single_code_point_is_safe_and_of_certain_width():
    wrong = []
    for point in range(0x110000):
        shown = text.visible(chr(point))
        if text.visible(shown) != shown or text.cell_width(shown) != cell_len(shown):
            wrong.append(hex(point))
    assert not wrong


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31m", "␛[31m"),
        ("\x9b31m", "\\x9b31m"),
        ("\u200b", "\\u200b"),
        ("\u202egnp", "\\u202egnp"),
        ("a\nb\tc\r", "a⏎b⇥c␍"),
        ("\x7f", "␡"),
        ("\udc80", "\\udc80"),
        ("[/INST]", "[/INST]"),
        ("的世界", "的世界"),
        ("e\u0301", "e\u0301"),
        ("\u0301", "\u25cc\u0301"),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\\u200d\U0001f469"),
        ("\u00a0", "\\xa0"),
        ("�", "�"),
    ],
)
def test_hidden_characters_are_spelled_out(raw, shown):
    assert text.visible(raw) == shown


def test_a_token_keeps_its_blanks_between_quotes():
    assert text.visible_token(" of ") == "' of '"


@pytest.mark.parametrize(
    ("nats", "shown"),
    [(0.0, "0"), (-0.0, "0"), (2.485e-4, "+0.0002485"), (-1.2e-7, "-1.200e-07"), (float("nan"), "NaN"),
     (float("-inf"), "-inf"), (1234.5, "+1.234e+03")],
)  # fmt: skip
def test_a_difference_shows_its_sign_and_only_zero_reads_zero(nats, shown):
    assert text.delta(nats) == shown


@given(st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_numbers_never_outgrow_their_columns(nats):
    assert len(text.logprob(nats)) <= text.LOGPROB_WIDTH
    assert len(text.delta(nats)) <= text.DELTA_WIDTH
    assert (text.delta(nats) == "0") == (nats == 0)


@given(st.just(0.0) | st.floats(min_value=1e-90, max_value=1e30))
def test_a_divergence_reads_zero_only_where_it_is_zero(nats):
    assert len(text.kl(nats)) <= text.KL_WIDTH
    assert (text.kl(nats) == "0") == (nats == 0)


def test_what_was_not_compared_is_no_zero():
    assert text.kl(None) == "–"
    assert text.kl(float("nan")) == "NaN"


def test_a_magnitude_has_two_digits():
    assert [text.magnitude(x) for x in (0.0, 1.28, 0.00946, 3.1e-6)] == ["0", "1.3", "0.0095", "3.1e-06"]


def test_times_and_sizes_read_as_people_write_them():
    assert [text.elapsed(s) for s in (0, 17.9, 61, 3723)] == ["0:00", "0:17", "1:01", "1:02:03"]
    assert [text.size(b) for b in (0, 999, 2_900_000, 5e15)] == ["0 B", "999 B", "2.9 MB", "5000.0 TB"]


def test_one_of_a_thing_is_not_many():
    assert [text.counted(n, "request") for n in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]
    assert text.counted(1, "token differs", "tokens differ") == "1 token differs"
    assert text.counted(3, "token differs", "tokens differ") == "3 tokens differ"
