"""Whatever a crash, a full disk or a stranger left in a session: it opens up to there, and says so."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from klbench.cli.headless import Plan, execute
from klbench.errors import KlbenchError, UndecidedError
from klbench.session.columns import load_columns
from klbench.session.comparing import side_of
from klbench.session.continuing import interrupted
from klbench.session.documents import locate_document, run_document
from klbench.session.folder import SessionFolder
from klbench.session.link import read_state, summarise
from klbench.session.report import gather, render
from tests.session.fake_engine import FakeBench
from tests.session.test_continuing import START

FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def session(tmp_path, capsys):
    path = tmp_path / "20261129-demo"
    execute(START, Plan("run"), session=path, json_place=None, make_work=FakeBench)
    capsys.readouterr()
    return SessionFolder(path)


def read_everything(folder):
    """All that a reader makes of a session; returns its state."""
    state = read_state(folder)
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
