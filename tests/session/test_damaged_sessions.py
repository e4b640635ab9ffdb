"""Whatever a crash, a full disk or a stranger left in a session: it opens up to there, and says so."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from klbench.cli import main
from klbench.cli.headless import Plan, execute
from klbench.errors import ExitCode, KlbenchError, UndecidedError
from klbench.session import events as ev
from klbench.session.columns import load_columns
from klbench.session.comparing import side_of
from klbench.session.documents import locate_document, run_document
from klbench.session.folder import SessionFolder
from klbench.session.interruption import interrupted
from klbench.session.log import read_log
from klbench.session.reading import read_state
from klbench.session.report import gather, render
from klbench.session.survey import summarise
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("places")]
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def session(tmp_path, capsys):
    path = tmp_path / "20261129-demo"
    execute(START, Plan("run"), session=path, json_place=None, make_work=FakeBench)
    capsys.readouterr()
    return SessionFolder(path)


def read_everything(folder):
    """All that a reader makes of a session; returns its state, None where nothing of it can be read."""
    try:
        state = read_state(folder)
    except UndecidedError:
        # It is refused only where not one event is left.
        assert all(isinstance(entry.event, ev.Damaged | ev.Unknown) for entry in read_log(folder.events))
        return None
    summarise(folder)
    interrupted(state)
    run_document(folder.path, state, state.run)
    locate_document(folder.path, state, state.run, state.latest_located)
    report = gather(folder.path, state)
    for name in ("md", "html", "json", "github"):
        render(report, name)
    try:
        side_of(folder, state)
    except UndecidedError:
        assert not any(helper.columns for run in state.runs for helper in run.helpers)
    return state


def cuts(content):
    """Ends of a log, one of every kind: at each event's line feed, and around each kind of byte in a line."""
    ends = {0, len(content)}
    for index, byte in enumerate(content):
        if byte == 0x0A:
            ends |= {index, index + 1}
    line = max(content.split(b"\n"), key=len)
    start = content.index(line)
    seen = set()
    for index, byte in enumerate(line):
        if byte not in seen:
            seen.add(byte)
            ends |= {start + index, start + index + 1}
    return sorted(ends)


def test_a_log_cut_at_every_kind_of_byte_opens_up_to_its_last_whole_event(session):
    content = session.events.read_bytes()
    before = -1
    for end in cuts(content):
        session.events.write_bytes(content[:end])
        state = read_everything(session)
        assert state.seq == content[:end].count(b"\n")
        assert state.seq >= before
        before = state.seq
    assert state.run.verdict is not None


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
def test_a_log_with_any_byte_changed_opens(session, place, byte):
    content = bytearray(session.events.read_bytes())
    try:
        content[int(place * len(content))] = byte
        damaged = SessionFolder(session.path.parent / "damaged")
        damaged.path.mkdir(exist_ok=True)
        (damaged.path / "session.json").write_bytes((session.path / "session.json").read_bytes())
        damaged.events.write_bytes(bytes(content))
        read_everything(damaged)
    finally:
        damaged.events.unlink()


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
def test_damaged_columns_load_or_are_refused_and_the_rest_opens(session, place, byte, cut):
    file = session.runs / "1-match.npz"
    whole = file.read_bytes()
    content = bytearray(whole)
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] = byte
    file.write_bytes(bytes(content))
    try:
        with_columns = load_columns(file)
    except KlbenchError:
        with_columns = None
    report = gather(session.path, read_state(session))
    plots = report.runs[0].helpers[0].plots
    assert (plots is None) == (with_columns is None)
    file.write_bytes(whole)


def test_damaged_lines_are_named_by_every_reader(session, capsys):
    lines = session.events.read_bytes().split(b"\n")
    for number in (2, 4, 5, 6):
        lines[number - 1] = b"\x00" * 40
    session.events.write_bytes(b"\n".join(lines))
    told = "4 lines of the event log are damaged (2, 4 to 6): what they told is missing"
    assert main(["open", str(session.path)]) == ExitCode.CONSISTENT
    assert told in capsys.readouterr().err
    assert main(["open", str(session.path), "--json", "-"]) == ExitCode.CONSISTENT
    assert '"damaged_lines": 4' in capsys.readouterr().out
    assert f"{told}." in gather(session.path, read_state(session)).not_checked


@pytest.mark.parametrize(
    "content", [b"\x00" * 5000 + b"\n", b"garbage\n" * 500, b"{}\n[]\n", b"\xff\n\xfe\n"]
)
def test_a_log_of_which_nothing_can_be_read_is_no_empty_session(session, content, capsys):
    session.events.write_bytes(content)
    lines = content.count(b"\n")
    for command in (["open"], ["report"], ["compare", str(session.path)], ["run", "--like"]):
        assert main([*command, str(session.path)]) == ExitCode.UNDECIDED
        told = capsys.readouterr().err
        assert f"nothing in {session.events} can be read · {lines} line" in told
        assert "damaged" in told


def test_the_list_names_a_session_that_cannot_be_read(session, capsys, monkeypatch):
    root = session.path.parent / "home" / "sessions"
    root.mkdir(parents=True)
    session.path.rename(root / session.name)
    (root / session.name / "events.jsonl").write_bytes(b"garbage\n")
    assert main(["sessions"]) == ExitCode.CONSISTENT
    assert f"{session.name}  cannot be read: nothing in" in capsys.readouterr().out
    monkeypatch.setenv("KLBENCH_HOME", str(root / session.name / "session.json"))
    assert main(["sessions"]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert "Not a directory" in told.err
    assert "no sessions" not in told.out


def test_a_line_of_half_a_gigabyte_is_passed_over_in_bounded_memory(session):
    whole = session.events.read_bytes()
    with session.events.open("wb") as log:
        log.truncate(512 * 1024**2)
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + whole)
    program = (
        "import pathlib, resource, sys\n"
        "from klbench.session.folder import SessionFolder\n"
        "from klbench.session.reading import read_state\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "state = read_state(SessionFolder(pathlib.Path(sys.argv[1])))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(len(state.runs), state.damage.count, (after - before) // 1024)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(session.path)], capture_output=True, text=True, check=True
    )
    runs, damaged, grown_mib = map(int, told.stdout.split())
    assert (runs, damaged) == (1, 1)
    assert grown_mib < 100


@pytest.mark.parametrize("content", [b" " * 2_000_000, b"[" * 900_000, b'{"schema": 1e999}', b"\xff" * 10])
def test_a_strange_description_of_a_session_is_refused_by_name(session, content, capsys):
    (session.path / "session.json").write_bytes(content)
    for command in (["open"], ["report"], ["run", "--session"]):
        assert main([*command, str(session.path)]) == ExitCode.USAGE
        assert f"cannot read {session.path / 'session.json'}" in capsys.readouterr().err
