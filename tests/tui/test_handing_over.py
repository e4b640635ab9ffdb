"""The session's texts in $PAGER and $EDITOR: in a real pseudo-terminal, with small programs of our own."""

import contextlib
import os
import signal
import stat
from types import SimpleNamespace

import psutil
import pytest
import recorded
from pilots import press, scripted_runner, workbench
from terminals import SCRIPT

from klbench.errors import UsageError
from klbench.session import events as ev
from klbench.tui import handing_over
from klbench.tui.handing_over import Document, program, write_copy

REPORT = "# Report\n\nA line \x1b]0;owned\x07 of it.\n"


def drawn(it) -> bool:
    return "[2] requests" in it.text and "q quit" in it.text and "▌" in it.text


@pytest.fixture
def shows(tmp_path):
    """A program that shows a file, keeps what it was given, and ends with the return key."""
    script = tmp_path / "shows"
    script.write_text(
        "#!/bin/sh\n"
        f'cat "$1" > {tmp_path}/seen; ls -l "$1" > {tmp_path}/listed; echo "$1" > {tmp_path}/place\n'
        f'echo ADDED >> "$1"; cat "$1"; echo THE PROGRAM SHOWS; read key; exit "${{CODE:-0}}"\n'
    )
    script.chmod(0o700)
    return script


@pytest.fixture
def reported(tmp_path):
    """A session with a report."""
    session = recorded.finished(tmp_path / "20251129-dense")
    (session / "reports" / "report-1.md").write_text(REPORT)
    lines = (session / "events.jsonl").read_bytes().count(b"\n")
    recorder = recorded.Recorder(session, at=recorded.BEGAN_AT + 900, seq=lines)
    recorder.add(ev.ReportWritten(files=["reports/report-1.json", "reports/report-1.md"]))
    return session


def shown(it, *keys: bytes) -> None:
    """Have it open something, up to what the program shows."""
    for key in keys:
        it.press(key)
    it.until(lambda t: "THE PROGRAM SHOWS" in t.text)


def leave(it) -> None:
    """End the program and the workbench, so that nothing of them is left."""
    it.screen.reset()
    it.press(b"\r")
    it.until(lambda t: "q quit" in t.text)
    it.press(b"q")
    assert it.ended() == 0


def test_the_log_opens_in_the_pager_without_a_character_that_a_terminal_obeys(terminal, shows, tmp_path):
    it = terminal(PAGER=f"'{shows}'", SSH_CONNECTION="1 2 3 4", SSH_TTY="/dev/pts/9")
    it.until(drawn)
    it.press(b"l")
    it.until(lambda t: "following" in t.text)
    it.press(b"V")
    it.until(lambda t: "the server's log in shows" in t.text and "the command log in shows" in t.text)
    before = len(it.raw)
    shown(it, b"\r")
    assert it.restored()
    content = (tmp_path / "seen").read_text()
    assert content.count("\n") == len(recorded.LOG)
    assert "␛]0;owned" in content
    assert "Loading: 100%" in content
    assert content.isprintable() or set(content) - {"\n"} == {c for c in content if c.isprintable()}
    assert b"\x1b]0;owned" not in it.raw[before:]
    assert (tmp_path / "listed").read_text().startswith("-r--------")
    it.press(b"\r")
    it.until(lambda t: "following" in t.text and "line 47 of 47" in t.text)
    assert not os.path.exists((tmp_path / "place").read_text().strip())
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()


def test_the_commands_open_as_lines_that_a_shell_takes(terminal, shows, tmp_path):
    it = terminal(PAGER=str(shows))
    it.until(drawn)
    it.press(b"@")
    it.until(lambda t: "what was run" in t.text)
    it.press(b"V")
    it.until(lambda t: "the command log in shows" in t.text)
    shown(it, b"\r")
    lines = (tmp_path / "seen").read_text().splitlines()
    assert lines[0].endswith("· 0.02 s · 200")
    assert lines[0].startswith("# ")
    assert lines[1] == "curl http://127.0.0.1:31234/server_info"
    assert "\\x1b" not in lines[3]
    assert "␛[31m" in lines[3] or "[/INST]" in lines[3]
    leave(it)


def test_the_editor_has_the_report_itself_and_a_pager_a_copy(terminal, reported, shows, tmp_path):
    script = "import sys\nfrom pathlib import Path\nfrom klbench.tui.terminal import run_workbench\n"
    script += "sys.exit(run_workbench(session=Path(sys.argv[1]), start=None, readonly=False))\n"
    report = reported / "reports" / "report-1.md"
    it = terminal(reported, script=script, PAGER=str(shows), EDITOR=f"{shows}", VISUAL="")
    it.until(drawn)
    it.press(b"V")
    it.until(lambda t: "the newest report in shows" in t.text)
    shown(it, b"r")
    assert report.read_text() == REPORT
    assert "␛]0;owned" in (tmp_path / "seen").read_text()
    it.press(b"\r")
    it.until(drawn)
    it.press(b"V")
    it.until(lambda t: "the newest report in shows" in t.text)
    it.screen.reset()
    shown(it, b"R")
    assert (tmp_path / "place").read_text().strip() == str(report)
    assert report.read_text() == REPORT + "ADDED\n"
    leave(it)


def test_a_key_for_the_program_is_not_one_for_the_workbench(terminal, shows):
    own_terminal = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    it = terminal(script=own_terminal + SCRIPT, PAGER=str(shows))
    it.until(drawn)
    it.press(b"V")
    it.until(lambda t: "the server's log in" in t.text)
    shown(it, b"l")
    it.press(b"\x03")  # the program ends by it, as programs do; the workbench hears it too
    it.until(lambda t: drawn(t) and "shows was ended by SIGINT" in t.text)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_program_too_and_leaves_nothing(terminal, shows, tmp_path, number, code):
    it = terminal(PAGER=str(shows))
    it.until(drawn)
    it.press(b"V")
    it.until(lambda t: "the server's log in" in t.text)
    shown(it, b"l")
    (program,) = psutil.Process(it.process.pid).children()
    os.kill(it.process.pid, number)
    assert it.ended() == code
    assert it.restored()
    assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE
    assert not os.path.exists((tmp_path / "place").read_text().strip())


@pytest.mark.parametrize(
    ("pager", "said"),
    [
        ("no-such-pager", "there is no program 'no-such-pager'"),
        ("less '", "$PAGER is no command"),
        ("true", "true ended at once"),
        ("false", "false ended with exit code 1"),
        ("sh -c 'kill -9 $$'", "sh was ended by SIGKILL"),
    ],
)
def test_a_bad_program_is_said_and_nothing_is_lost(terminal, pager, said):
    patient = "from klbench.tui import handing_over\nhanding_over._NOTHING_SEEN_S = 60.0\n"
    it = terminal(script=patient + SCRIPT, PAGER=pager)
    it.until(drawn)
    it.press(b"jjV")
    it.until(lambda t: "the server's log in" in t.text)
    it.press(b"l")
    it.until(lambda t: drawn(t) and said in t.text)
    it.press(b"q")
    assert it.ended() == 0
    assert it.restored()


async def test_giving_the_terminal_away_and_taking_it_back_is_not_the_programs_time(monkeypatch):
    now = [100.0]

    class Slow:
        """A terminal that takes five seconds to change hands."""

        batch_update = staticmethod(contextlib.nullcontext)

        @contextlib.contextmanager
        def suspend(self):
            now[0] += 5.0
            yield
            now[0] += 5.0

    monkeypatch.setattr(handing_over, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert "true ended at once" in await handing_over.hand_over(Slow(), ["true"])


async def test_without_a_terminal_to_give_away_it_says_so(finished):
    async with workbench(finished) as (app, pilot):
        app.settings = None
        text = await press(pilot, "V", "l")
        assert "this terminal cannot be given to another program" in text


async def test_a_session_without_a_text_says_why_not(tmp_path):
    session = tmp_path / "20251129-new"
    recorded.start(session)
    async with scripted_runner(session), workbench(session) as (app, pilot):
        assert "there is nothing to open yet" in await press(pilot, "V")
        assert len(app.screen_stack) == 2


async def test_the_body_of_the_call_under_the_cursor_comes_first(finished):
    lines = (finished / "events.jsonl").read_bytes().count(b"\n")
    recorder = recorded.Recorder(finished, at=recorded.BEGAN_AT + 900, seq=lines)
    line = "curl -d @calls/0123456789abcdef.json http://127.0.0.1:31234/generate"
    recorder.add(ev.Call(line=line, outcome="200", elapsed_s=2.31))
    async with workbench(finished) as (_app, pilot):
        text = await press(pilot, "at", "V")
        assert text.index("the body of this call") < text.index("the command log")


def test_a_bundle_makes_no_file_of_its_reader_open(reported):
    from klbench.session.reading import read_state
    from klbench.tui.model import Model

    folder = recorded.folder_of(reported)
    lines = (reported / "events.jsonl").read_bytes().count(b"\n")
    recorded.Recorder(reported, at=recorded.BEGAN_AT + 999, seq=lines).add(
        ev.ReportWritten(files=["../../etc/secret.md"])
    )
    model = Model(folder=folder, state=read_state(folder), readable_only=True)
    names = [document.file.name for document in handing_over.documents(model, "main")]
    assert names == ["report-1.md", "server.log", "events.jsonl"]


def test_the_variables_win_in_the_order_that_every_program_knows():
    path = {"PATH": os.defpath}
    assert program("editor", {**path, "VISUAL": "true -w", "EDITOR": "false"}) == ["true", "-w"]
    assert program("editor", {**path, "EDITOR": "false"}) == ["false"]
    with pytest.raises(UsageError, match="there is no pager: less and more are not installed"):
        program("pager", {"PATH": "/nowhere"})


def test_a_log_that_is_too_large_is_copied_from_its_end_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(handing_over, "MOST_COPIED_BYTES", 30)
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "copy").mkdir()
    copy = write_copy(Document("log", "the server's log", log), tmp_path / "copy")
    first, *rest = copy.read_text().splitlines()
    assert first.startswith("[the first ")
    assert str(log) in first
    assert rest == ["line 97", "line 98", "line 99"]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o400


def test_a_log_that_grows_as_fast_as_it_is_copied_has_an_end(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {number}\n" for number in range(10)))
    (tmp_path / "copy").mkdir()
    copied = []

    def grow(line: str) -> str:
        copied.append(line)
        if len(copied) < 1000:
            with open(log, "a") as file:
                file.write("one more\n")
        return line

    write_copy(Document("log", "the server's log", log), tmp_path / "copy", grow)
    assert copied == [f"line {number}" for number in range(10)]
