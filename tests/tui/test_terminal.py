"""The workbench in a real pseudo-terminal: what pilots cannot see.

What is really written is read; signals are real; the process is real.
"""

import base64
import os
import re
import signal
import time

import psutil
import pytest
from terminals import DEADLINE_S, SCRIPT


def drawn(terminal) -> bool:
    return "[2] requests" in terminal.text and "q quit" in terminal.text and "▌" in terminal.text


def loaded(terminal) -> bool:
    """Whether what it opened is on the screen, too, and no more is to come."""
    return drawn(terminal) and "5 of 32 diverged" in terminal.text


def test_it_starts_draws_and_quits_leaving_the_terminal_as_it_was(terminal):
    it = terminal()
    it.until(drawn)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()
    assert b"klbench open 20251129-dense" in it.raw


@pytest.mark.parametrize("when", ["first frame", "before it"])
def test_a_key_typed_ahead_of_the_screen_is_not_lost(terminal, when):
    it = terminal()
    it.until(drawn if when == "first frame" else lambda t: b"\x1b[?1049h" in t.raw)
    it.press(b"\r")
    it.until(lambda t: "request 23" in t.text.splitlines()[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_detaches_and_restores_the_terminal(terminal, number, code):
    it = terminal()
    it.until(drawn)
    os.kill(it.process.pid, number)
    assert it.ended() == code
    assert it.restored()


def test_a_lost_terminal_ends_the_screen_quietly(terminal, tmp_path):
    it = terminal()
    it.until(drawn)
    os.close(it.master)
    os.close(it._slave)
    os.kill(it.process.pid, signal.SIGHUP)
    assert it.process.wait(60.0) == 129
    assert not list((tmp_path / "20251129-dense").glob("crash-*"))


def test_hostile_tokens_reach_the_terminal_only_spelled_out(terminal):
    it = terminal(rows=50, columns=160)
    it.until(drawn)
    it.press(b"\r")
    it.until(lambda t: "request" in t.text.splitlines()[0])
    it.press(b"G")
    it.until(lambda t: "row 128 of 128" in t.text)
    it.press(b"\x1b")
    it.until(drawn)
    it.press(b"l")
    it.until(lambda t: "following" in t.text)
    assert b"owned" in it.raw
    assert b"\x1b]0;owned" not in it.raw
    assert "\u202e".encode() not in it.raw
    assert "\u200b".encode() not in it.raw


def test_it_survives_a_storm_of_sizes(terminal):
    it = terminal()
    it.until(drawn)
    for rows, columns in ((10, 30), (70, 250), (24, 80), (16, 60), (40, 120)):
        it.resize(rows, columns)
        os.kill(it.process.pid, signal.SIGWINCH)
        it.read(0.05)
    it.until(lambda t: drawn(t) and t.text.splitlines()[-1].startswith(" enter tokens"))
    it.press(b"q")
    assert it.ended() == 0


def test_a_size_in_the_environment_does_not_hold_the_screen(terminal):
    it = terminal(COLUMNS="80", LINES="24")
    it.until(drawn)
    it.resize(40, 120)
    os.kill(it.process.pid, signal.SIGWINCH)
    it.until(lambda t: drawn(t) and t.text.splitlines()[-1].startswith(" enter tokens"))


def test_an_idle_screen_sends_nothing(terminal):
    it = terminal()
    it.until(loaded)
    deadline = time.monotonic() + DEADLINE_S
    while it.read(3.0):
        assert time.monotonic() < deadline, "it never stopped sending"


def test_a_crash_of_the_screen_restores_the_terminal_and_prints_no_values(terminal, tmp_path):
    script = SCRIPT.replace(
        "from klbench.tui.terminal import run_workbench",
        "from klbench.tui.terminal import run_workbench\n"
        "from klbench.tui.screens.main import MainScreen\n"
        "def broken(self):\n    value = 'hunter2' + 'hunter2'\n    raise RuntimeError('broken on purpose')\n"
        "MainScreen.do_pane_1 = broken",
    )
    it = terminal(script=script)
    it.until(drawn)
    it.press(b"1")
    assert it.ended() == 70
    assert it.restored()
    assert b"this is a defect of klbench" in it.raw
    assert b"hunter2hunter2" not in it.raw
    assert b"Traceback" not in it.raw
    (kept,) = (tmp_path / "20251129-dense").glob("crash-workbench-*.txt")
    assert "broken on purpose" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def stopped(terminal) -> bool:
    return psutil.Process(terminal.process.pid).status() == psutil.STATUS_STOPPED


def test_control_z_suspends_and_the_foreground_brings_it_back(terminal):
    it = terminal()
    it.until(drawn)
    it.press(b"\x1a")
    it.until(lambda t: stopped(t) and t.restored())
    it.screen.reset()
    os.kill(it.process.pid, signal.SIGCONT)
    it.until(drawn)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()


def test_errors_to_a_file_leave_the_screen_on_the_terminal(terminal, tmp_path):
    with open(tmp_path / "errors", "wb") as errors:
        it = terminal(flags=[], stderr=errors)
    it.until(drawn)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()
    said = (tmp_path / "errors").read_bytes()
    assert b"klbench open 20251129-dense" in said
    assert b"\x1b" not in said


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_is_told_what_works(terminal, kind):
    it = terminal(flags=["--theme", "dark"], TERM=kind)
    it.until(lambda t: t.process.poll() is not None)
    it.ended()
    assert b"\x1b" not in it.raw
    assert b"prefill_cache_hit" in it.raw  # what the session holds, as text


def test_ascii_sends_nothing_but_ascii(terminal):
    it = terminal(flags=["--ascii"], rows=50, columns=160)
    main = "5 of 32 diverged"
    it.until(lambda t: main in t.text and "q quit" in t.text)
    for key, words in (
        (b"\r", "klbench . request 23 ."),
        (b"\x1b", main),
        (b"l", "server.log . following"),
        (b"\x1b", main),
        (b"O", "layers x rows"),
        (b"\x1b", main),
        (b"?", "type to search the keys"),
    ):
        it.press(key)
        it.until(lambda t, words=words: words in t.text)
        it.settle()
    assert it.raw.isascii()
    assert b"'\\u7684'" in it.raw
    assert b"'[/INST]'" in it.raw


def colours(raw: bytes) -> set[bytes]:
    """Every parameter of the colour sequences in `raw`."""
    return {part for found in re.findall(rb"\x1b\[([0-9;]*)m", raw) for part in found.split(b";") if part}


def test_no_color_sends_no_colour(terminal):
    it = terminal(NO_COLOR="1")
    it.until(drawn)
    it.press(b"\r")
    it.until(lambda t: "request 23" in t.text.splitlines()[0])
    it.settle()
    assert colours(it.raw) <= {b"0", b"1", b"2", b"7", b"22", b"27", b"39", b"49"}


def test_a_terminal_of_16_colours_gets_no_others(terminal):
    it = terminal(flags=[], TERM="screen")
    it.until(drawn)
    it.settle()
    assert not {b"38", b"48"} & colours(it.raw)
    assert colours(it.raw) & {b"34", b"44", b"94", b"97"}


WHOLE_PICTURES = """
import sys
from klbench.tui import slow_link
flags = {flags!r}
slow_link.prepare(slow="--slow-link" in flags)  # before Textual is imported, as the command line does it
from klbench.tui.screens import one_picture
one_picture._MOST_LOOKS = 1_000_000  # on a starved machine, too, a picture waits for all that belongs to it
from klbench.cli import main
sys.exit(main([*flags, "open", sys.argv[1]]))
"""


def test_a_slow_link_gets_a_third_fewer_bytes_and_no_mouse(terminal):
    usual, slow = (
        terminal(script=WHOLE_PICTURES.format(flags=flags), rows=40, columns=120, COLORTERM="truecolor")
        for flags in ([], ["--slow-link"])
    )
    sent = []
    for it in (usual, slow):
        it.until(loaded)
        it.settle()
        before = len(it.raw)
        it.press(b"t")
        it.until(lambda t: "12,288 tokens of" in t.text and "q quit" in t.text)
        it.settle()
        sent.append(len(it.raw) - before)
    assert sent[1] < 0.67 * sent[0]
    assert b"\x1b[?1000h" in usual.raw
    assert b"\x1b[?1000h" not in slow.raw


def test_a_slow_ssh_line_is_noticed_and_what_helps_is_said(terminal):
    # Any answer is a slow one, and none comes too late.
    patient = "from klbench.tui import slow_link\nslow_link.SLOW_S, slow_link._LIMIT_S = 0.0, 600.0\n"
    it = terminal(script=patient + SCRIPT, SSH_CONNECTION="1 2 3 4")
    it.until(lambda t: b"\x1b[6n" in t.raw)
    it.press(b"\x1b[24;80R")
    it.until(lambda t: drawn(t) and "klbench --slow-link sends less" in t.text)
    it.press(b"j")
    it.until(lambda t: "--slow-link" not in t.text)


def test_a_copy_goes_to_the_terminal_and_into_a_file(terminal, tmp_path):
    it = terminal(flags=[])
    it.until(drawn)
    it.press(b"@")
    it.until(lambda t: "what was run" in t.text)
    it.press(b"y")
    it.until(lambda t: "OSC 52" in t.text)
    found = re.search(rb"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", it.raw)
    copied = base64.b64decode(found[1]).decode()
    assert copied.startswith("curl -d ")
    assert "\x1b" not in copied
    assert (tmp_path / "20251129-dense" / "clipboard.txt").read_text() == copied


def test_the_theme_is_remembered(terminal):
    it = terminal(flags=[], COLORTERM="truecolor")
    it.until(drawn)
    it.press(b"T")
    it.until(lambda t: "the light theme" in t.text)
    it.press(b"q")
    assert it.ended() == 0
    again = terminal(flags=[], COLORTERM="truecolor")
    again.until(drawn)
    again.settle()
    assert b"48;2;250;251;252" in again.raw
