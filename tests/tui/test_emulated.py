"""The emulator that the tests of real terminals read."""

import pyte

from tests.emulated import text_of


def test_half_of_a_wide_character_that_is_written_over_is_no_trouble():
    screen = pyte.Screen(6, 2)
    stream = pyte.ByteStream(screen)
    stream.feed("a漢b".encode())
    assert text_of(screen) == "a漢b\n"

    stream.feed(b"\x1b[1;2Hx")  # and the rest of the line is still to come

    assert text_of(screen).startswith("ax")
