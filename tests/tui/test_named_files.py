"""A session from a stranger is data: no name in it makes klbench open a file that is not the session's own.

Every reader of a name is asked with every way out of the folder: what it opens is watched, so that a pipe
fails the test and does not hang it.
"""

import asyncio
import builtins
import io
import os
import stat
import zipfile
from types import SimpleNamespace

import pytest
import recorded

from klbench.cli.reporting import _script
from klbench.core.columns import HELPERS
from klbench.engine.ulp_rows import ORIGIN_ROWS
from klbench.errors import KlbenchError
from klbench.session import events as ev
from klbench.session.bundle import write_bundle
from klbench.session.comparing import compare, side_of
from klbench.session.continuing import recorded_prompts, saved_generation
from klbench.session.experimenting import verdict_now
from klbench.session.exporting import export_located, trace_dir_of
from klbench.session.folder import SessionFolder
from klbench.session.liking import check_then, start_like
from klbench.session.reading import read_state
from klbench.session.replaying import _columns
from klbench.session.report import gather
from klbench.tui.follow import SessionFollower
from klbench.tui.handing_over import documents, write_copy
from klbench.tui.measurement import load_measurement
from klbench.tui.model import Model
from klbench.tui.screens.origin import origin_numbers

SECRET = "root:x:0:0:a secret of this machine"
BODY = "calls/0123456789abcdef.json"


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's own, beside the session."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.md").write_text(SECRET)
    return folder


@pytest.fixture
def session(tmp_path):
    return SessionFolder(recorded.finished(tmp_path / "session"))


@pytest.fixture
def opened(outside, monkeypatch):
    """What is opened outside of the session; what would be waited for or read for ever is not opened then."""
    found = []

    def look(file, flags):
        if not isinstance(file, (str, bytes, os.PathLike)):
            return
        place = os.path.realpath(os.fsdecode(file))
        waits = os.path.exists(place) and stat.S_ISFIFO(os.stat(place).st_mode) and not flags & os.O_NONBLOCK
        if waits or place == "/dev/zero" or place.startswith(str(outside)):
            found.append(place)
        if waits or place == "/dev/zero":
            raise OSError("it would never end")

    real_open, real_os_open = builtins.open, os.open

    def watched(file, *args, **kwargs):
        look(file, 0)
        return real_open(file, *args, **kwargs)

    def watched_os(file, flags, *args, **kwargs):
        look(file, flags)
        return real_os_open(file, flags, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(os, "open", watched_os)
    return found


def add(session: SessionFolder, *events: ev.Event) -> None:
    lines = session.events.read_bytes().count(b"\n")
    recorder = recorded.Recorder(session.path, at=recorded.BEGAN_AT + 900, seq=lines)
    for event in events:
        recorder.add(event)


# Who reads: each returns all that a user would be shown of it.


def model_of(session) -> Model:
    model = Model()
    model.turn_to(session)
    model.state = read_state(session)
    return model


def copies(session, tmp_path, kind: str, call: str = "") -> str:
    """What the pager would get."""
    found = [one for one in documents(model_of(session), "log", call) if one.name == kind]
    return "".join(write_copy(document, tmp_path).read_text() for document in found)


def followed(session, name, _tmp_path):
    add(session, ev.ServerStarting(command="x", log=name, ready_to_capture=True))
    posted = []
    follower = SessionFollower(session, posted.append)
    follower.look()
    follower.look()
    return "\n".join(posted[0].log_lines)


def log_in_the_pager(session, name, tmp_path):
    add(session, ev.ServerStarting(command="x", log=name, ready_to_capture=True))
    return copies(session, tmp_path, "log")


def report_in_the_pager(session, name, tmp_path):
    add(session, ev.ReportWritten(files=[name]))
    return copies(session, tmp_path, "report")


def with_columns(session, name):
    result = read_state(session).run.helper("match").result
    add(session, ev.HelperEnded(run=1, helper="match", result=result, columns=name, elapsed_s=1.0))
    return read_state(session)


def columns_on_the_screen(session, name, _tmp_path):
    return str(load_measurement(session, 1, with_columns(session, name).run.helper("match")))


def columns_in_the_report(session, name, _tmp_path):
    return str(gather(session.path, with_columns(session, name)))


def columns_in_the_verdict(session, name, _tmp_path):
    state = with_columns(session, name)
    return str(verdict_now(session, state, state.run))


def columns_compared(session, name, _tmp_path):
    side = side_of(session, with_columns(session, name))
    return str(asyncio.run(compare(side, side)))


def columns_repeated(session, name, _tmp_path):
    side = side_of(session, with_columns(session, name))
    return str(check_then(side, verdict=False))


def columns_replayed(session, name, _tmp_path):
    state = with_columns(session, name)
    located = SimpleNamespace(run=1, helper="match")
    return str(_columns(SimpleNamespace(folder=session, state=state), located))


def texts(session, name, _tmp_path):
    add(session, ev.TokenTexts(run=1, helper="match", file=name))
    return str(load_measurement(session, 1, read_state(session).run.helper("match")).texts)


def prompts(session, name, _tmp_path):
    started = ev.RunStarted(run=2, helpers=[], prompts={"sha256": "ab"}, options={}, prompts_file=name)
    add(session, started)
    return str(recorded_prompts(session, read_state(session).run))


NAMED = [
    followed, log_in_the_pager, report_in_the_pager, columns_on_the_screen, columns_in_the_report,
    columns_in_the_verdict, columns_compared, columns_repeated, columns_replayed, texts, prompts,
]  # fmt: skip
WAYS = ["absolute", "dotdot", "dotdot inside", "link", "link of a folder", "link to a device", "pipe"]


def way_out(way: str, session: SessionFolder, outside) -> str:
    """A name that an event may hold, and what it leads to."""
    match way:
        case "absolute":
            return str(outside / "secret.md")
        case "dotdot":
            return "../outside/secret.md"
        case "dotdot inside":
            return "runs/../../outside/secret.md"
        case "link":
            (session.runs / "x.md").symlink_to(outside / "secret.md")
        case "link of a folder":
            (session.runs / "away").symlink_to(outside)
            return "runs/away/secret.md"
        case "link to a device":
            (session.runs / "x.md").symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(session.runs / "x.md")
    return "runs/x.md"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", NAMED)
def test_no_name_in_a_log_leads_out_of_the_session(read, way, session, outside, opened, tmp_path):
    name = way_out(way, session, outside)
    try:
        shown = read(session, name, tmp_path)
    except KlbenchError as error:
        shown = f"{error.what} {error.why}"
    assert opened == []
    assert SECRET not in shown


# Names of our own, in a folder that a stranger packed.


def body_in_the_pager(session, tmp_path):
    return copies(session, tmp_path, "body", f"curl -d @{BODY} http://127.0.0.1/generate")


def saved_arm(session, _tmp_path):
    return str(saved_generation(session, read_state(session).run, "match", {}))


def with_trace(session):
    result = recorded.located(0, "match")
    result["capture"]["trace_dir"] = str(session.traces / "trace-1")
    add(session, ev.Located(locate=2, run=1, helper="match", request=0, result=result, elapsed_s=1.0))
    return read_state(session).latest_located


def rows_shown(session, _tmp_path):
    return str(origin_numbers(trace_dir_of(session, with_trace(session)), 0))


def exported(session, tmp_path):
    done = export_located(session, with_trace(session), 0, tmp_path / "export")
    return "".join(file.read_bytes().decode("latin-1") for file in done.folder.iterdir())


def script_in_an_issue(session, _tmp_path):
    file = _script(session)
    return file.read_text() if file is not None else ""


def bundled(session, tmp_path):
    with zipfile.ZipFile(write_bundle(session, tmp_path / "x.klbench.zip", None)) as archive:
        return "".join(archive.read(name).decode("latin-1") for name in archive.namelist())


KEPT = "traces/trace-1-replay-0/carrier-1"
OWN = [
    (body_in_the_pager, BODY),
    (saved_arm, "runs/1-match-generation.npz"),
    (script_in_an_issue, "exports/origin-1/show.py"),
    (bundled, "exports/origin-1/show.py"),
    (bundled, "reports/report-1.md"),
    (exported, f"{KEPT}/kept-0.safetensors"),
    (exported, f"{KEPT}/replay-0.json"),
    (rows_shown, f"traces/trace-1/{ORIGIN_ROWS}"),
    (exported, f"traces/trace-1/{ORIGIN_ROWS}"),
]
# A session of one's own may keep its traces elsewhere, by a link, too.
WAYS_TO_OWN = [
    (read, name, way)
    for read, name in OWN
    for way in ("link", "link of its folder", "pipe")
    if not (ORIGIN_ROWS in name and way == "link of its folder")
]


@pytest.mark.parametrize(("read", "name", "way"), WAYS_TO_OWN)
def test_no_file_of_a_session_is_read_through_a_link_or_a_pipe(
    read, name, way, session, outside, opened, tmp_path
):
    file = session.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    for place in (file.parent, outside):
        # What a replay's description lies beside.
        (place / "kept-0.safetensors").write_bytes(b"")
    (outside / file.name).write_text(SECRET)
    file.unlink(missing_ok=True)
    if way == "link":
        file.symlink_to(outside / file.name)
    elif way == "pipe":
        os.mkfifo(file)
    else:
        file.parent.rename(tmp_path / "moved")
        file.parent.symlink_to(outside)
    opened.clear()
    try:
        shown = read(session, tmp_path)
    except KlbenchError as error:
        shown = f"{error.what} {error.why}"
    assert opened == []
    assert SECRET not in shown


# What a bundle says of the machine that it comes from.


def test_a_bundle_has_no_traces_wherever_it_says_that_they_lie(session, outside, opened):
    located = with_trace(session)
    located.result["capture"]["trace_dir"] = str(outside)
    (session.path / "bundle.json").write_text("{}")
    for read in (lambda: trace_dir_of(session, located), lambda: export_located(session, located, 0)):
        with pytest.raises(KlbenchError, match="a bundle holds no traces"):
            read()
    assert opened == []


def as_asked(session, **options) -> None:
    target = {"kind": "demo", "model": "dense"}
    add(session, ev.RunnerStarted(klbench_version="1", pid=1, host="x", target=target, options=options))


def test_repeating_a_bundle_takes_over_no_path_of_another_machine(session, outside):
    paths = {"server_python": "/tmp/python", "trace_dir": str(outside), "path_maps": ["/a=/b"]}
    as_asked(session, helpers=list(HELPERS), **paths)
    own, _ = start_like(session)
    assert (own.options.server_python, own.options.trace_dir) == ("/tmp/python", str(outside))
    (session.path / "bundle.json").write_text("{}")
    start, _ = start_like(session)
    assert (start.options.server_python, start.options.trace_dir, start.options.path_maps) == (None, None, ())
    as_asked(session, prompts=str(outside / "secret.md"))
    with pytest.raises(KlbenchError, match="cannot be repeated"):
        start_like(session)


def test_a_log_outside_is_said_where_the_log_is_shown(session, outside, tmp_path):
    shown = followed(session, str(outside / "secret.md"), tmp_path)
    assert shown.startswith("[the server's log is not read: the session names a file outside of itself")
