"""run, locate and demo without a terminal: documents, exit codes, signals."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from klbench.cli import main
from klbench.cli.failures import VOICE
from klbench.cli.headless import Plan, execute
from klbench.errors import ExitCode, UsageError
from klbench.session.folder import SessionFolder
from klbench.session.log import read_log
from klbench.session.reading import read_state
from klbench.session.request import Options, StartRequest, Target
from tests.session.scripted import DIVERGED, FINDING, RESULT, ScriptedWork

START = StartRequest(target=Target(kind="demo", model="dense"), options=Options(helpers=("match",)))
NOT_RUN = {**RESULT, "status": "not_run", "reason": "0 hits"}


pytestmark = pytest.mark.usefixtures("places")


def headless(tmp_path, what="run", start=START, **script):
    """The exit code and the JSON document of one command."""
    place = tmp_path / "result.json"
    code = execute(
        start,
        Plan(what),
        session=tmp_path / "session",
        json_place=str(place),
        make_work=functools.partial(ScriptedWork, **script),
    )
    return code, json.loads(place.read_text())


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ({"match": RESULT}, ExitCode.CONSISTENT),
        ({"match": DIVERGED}, ExitCode.DIVERGED),
        ({"match": NOT_RUN}, ExitCode.UNDECIDED),
        ({"match": {**RESULT, "status": "inconclusive"}}, ExitCode.UNDECIDED),
        ({"match": {**RESULT, "status": "error"}}, ExitCode.UNDECIDED),
    ],
)
def test_run_says_in_its_exit_code_whether_a_helper_diverged(tmp_path, results, code):
    assert headless(tmp_path, results=results)[0] == code


def test_one_diverged_helper_outweighs_one_that_did_not_run(tmp_path):
    start = StartRequest(target=START.target)
    results = {"match": NOT_RUN, "decode_cache_hit": DIVERGED}
    assert headless(tmp_path, start=start, results=results)[0] == ExitCode.DIVERGED


def test_the_document_of_a_run_has_the_contracts_fields(tmp_path):
    _, document = headless(tmp_path, results={"match": DIVERGED})
    assert document["schema"] == "klbench.run/1"
    for name in ("klbench_version", "session", "started_at", "elapsed_s", "options", "server", "prompts"):
        assert document[name] not in (None, "")
    assert document["helpers"]["match"]["requests_detail"][0]["first_divergence"]["position"] == 268
    assert set(document["verdict"]) >= {"status", "conditions", "grade", "evidence", "next"}
    assert "error" not in document


def test_with_progress_as_json_every_line_on_stderr_is_one_object(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(VOICE, "as_json", True)
    assert headless(tmp_path, "locate", results={"match": DIVERGED})[0] == ExitCode.DIVERGED
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.keys() >= {"schema", "at", "type", "text"} for line in lines)
    assert lines[0]["session"] == str(tmp_path / "session")
    assert [line["type"] for line in lines if line["type"] in ("helper_ended", "run_ended", "job_ended")] == [
        "helper_ended",
        "run_ended",
        "job_ended",
        "job_ended",
    ]


def test_locate_finds_the_origin_of_a_divergence(tmp_path):
    code, document = headless(tmp_path, "locate", results={"match": DIVERGED})
    assert code == ExitCode.DIVERGED
    assert document["schema"] == "klbench.locate/1"
    assert document["findings"][0]["module"] == "model.layers.1.self_attn.o_proj"
    assert (document["helper"], document["request"], document["masked"]) == ("match", 2, [])


def test_locate_without_a_divergence_is_consistent_and_traces_nothing(tmp_path):
    code, document = headless(tmp_path, "locate")
    assert code == ExitCode.CONSISTENT
    assert document["findings"] == []
    assert document["statuses"] == {"match": "clean"}


@pytest.mark.parametrize(
    "findings", [[], [{**FINDING, "latent": True}], [{**FINDING, "kind": "not_observed"}]]
)
def test_a_divergence_without_an_origin_is_undecided(tmp_path, findings):
    code, _ = headless(tmp_path, "locate", results={"match": DIVERGED}, findings=findings)
    assert code == ExitCode.UNDECIDED


def test_locate_cannot_answer_where_nothing_was_compared(tmp_path):
    assert headless(tmp_path, "locate", results={"match": NOT_RUN})[0] == ExitCode.UNDECIDED


def test_demo_locates_only_what_diverged(tmp_path, capsys):
    assert headless(tmp_path, "demo", results={"match": DIVERGED})[0] == ExitCode.DIVERGED
    shown = capsys.readouterr().out
    assert "diverged" in shown
    assert "model.layers.1.self_attn.o_proj" in shown


def test_a_server_that_does_not_start_gives_3_and_a_document_with_the_error(tmp_path):
    code, document = headless(tmp_path, fail="launch")
    assert code == ExitCode.NO_SERVER
    assert document["error"] == {"what": "no server", "why": "the scheduler died", "next": "read the log"}


def test_a_defect_gives_70_a_crash_file_and_one_safe_line(tmp_path, capsys):
    code, document = headless(tmp_path, fail="match")
    assert code == ExitCode.INTERNAL
    assert "RuntimeError: boom" in document["error"]["what"]
    assert document["helpers"]["match"]["status"] == "not_run"
    assert list((tmp_path / "session").glob("crash-*.txt"))
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err


def test_json_on_stdout_is_all_that_is_on_stdout(tmp_path, capsys):
    execute(START, Plan("run"), session=tmp_path / "session", json_place="-", make_work=ScriptedWork)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["helpers"]["match"]["status"] == "clean"
    assert "match · generation arm" in shown.err


def test_a_session_in_use_is_refused(tmp_path):
    program = PROGRAM.replace("hold=()", "hold=['match']")
    with interrupted(tmp_path, program) as process:
        code = headless(tmp_path)[0]
        assert code == ExitCode.USAGE
        process.send_signal(signal.SIGTERM)


PROGRAM = """
import functools, pathlib, sys
from klbench.cli.headless import Plan, execute
from klbench.session.request import Options, StartRequest, Target
from tests.session.scripted import ScriptedWork
start = StartRequest(target=Target(kind="demo", model="dense"), options=Options())
sys.exit(execute(start, Plan("run"), session=pathlib.Path(sys.argv[1]), json_place=sys.argv[2],
                 make_work=functools.partial(ScriptedWork, hold=())))
"""


def interrupted(tmp_path, program):
    """A process that hangs in the helper it holds; returned once it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "session"), str(tmp_path / "killed.json")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wanted = "prefill_cache_hit" if "prefill_cache_hit" in program else "match"
    for line in process.stderr:
        if line.startswith(f"{wanted} · generation arm"):
            return process
    raise AssertionError(f"it ended with {process.wait()}")


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_it_in_order_and_the_document_says_so(tmp_path, signum, code):
    program = PROGRAM.replace("hold=()", "hold=['prefill_cache_hit']")
    with interrupted(tmp_path, program) as process:
        process.send_signal(signum)
        process.stderr.read()
        assert process.wait() == code
    document = json.loads((tmp_path / "killed.json").read_text())
    assert document["error"]["what"] == f"interrupted by {signal.Signals(signum).name}"
    assert document["helpers"]["match"]["status"] == "clean"
    assert document["helpers"]["prefill_cache_hit"]["reason"] == "interrupted in the generation arm"
    state = read_state(SessionFolder(tmp_path / "session"))
    assert state.run.cancelled
    assert state.runner.ended == f"interrupted by {signal.Signals(signum).name}"


def test_a_killed_command_leaves_a_session_that_says_so_and_can_be_continued(tmp_path):
    program = PROGRAM.replace("hold=()", "hold=['prefill_cache_hit']")
    with interrupted(tmp_path, program) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    state = read_state(SessionFolder(tmp_path / "session"))
    assert not state.runner.alive
    assert [helper.status for helper in state.run.helpers] == ["clean", "stopped", "stopped"]
    assert headless(tmp_path)[0] == ExitCode.CONSISTENT


def test_a_signal_while_the_document_is_written_does_not_lose_it(tmp_path):
    pipe = tmp_path / "result"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "session"), str(pipe)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("decode_cache_hit · clean"):
            break
    # Its work has ended once the log says so; then it waits for somebody to open the pipe.
    with log_until(tmp_path / "session" / "events.jsonl", "RunnerEnded"):
        process.send_signal(signal.SIGTERM)
    with open(pipe, encoding="utf-8") as document:
        helpers = json.load(document)["helpers"]
    process.stderr.read()
    assert process.wait() == ExitCode.CONSISTENT
    assert [helper["status"] for helper in helpers.values()] == ["clean"] * 3


@contextlib.contextmanager
def log_until(path, name):
    """Enters once the log has an event of that type; the deadline only ends a test that would never end."""
    deadline = time.monotonic() + 60
    while not any(type(entry.event).__name__ == name for entry in read_log(path)):
        assert time.monotonic() < deadline
    yield


def test_the_bell_rings_only_where_there_is_a_terminal_and_the_user_wants_it(tmp_path, monkeypatch, capsys):
    start = msgspec.structs.replace(START, options=msgspec.structs.replace(START.options, notify=True))
    headless(tmp_path, start=start)
    shown = capsys.readouterr().err
    assert "klbench: done with exit code 0" in shown
    assert "\a" not in shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    headless(tmp_path, start=start)
    assert "\a" in capsys.readouterr().err
    headless(tmp_path)
    assert "\a" not in capsys.readouterr().err


def test_the_options_of_a_runner_reach_it_from_the_command_line(monkeypatch):
    asked = []
    monkeypatch.setattr("klbench.cli.headless.execute", lambda start, *_, **__: asked.append(start) or 0)
    assert main(["run", "--demo", "--keep-idle", "60", "--notify"]) == 0
    assert (asked[0].options.keep_idle_s, asked[0].options.notify) == (60.0, True)
    assert main(["run", "--demo"]) == 0
    assert (asked[1].options.keep_idle_s, asked[1].options.notify) == (1800.0, False)


@pytest.mark.parametrize("named", [False, True])
def test_a_command_that_was_wrong_from_the_start_leaves_no_session(tmp_path, capsys, named):
    class Wrong(ScriptedWork):
        async def launch(self, _job):
            raise UsageError("no such prompt file", next="name another")

    place = tmp_path / "result.json"
    session = tmp_path / "new" if named else None
    code = execute(START, Plan("run"), session=session, json_place=str(place), make_work=Wrong)
    assert code == ExitCode.USAGE
    assert json.loads(place.read_text()) == {
        "session": None,
        "error": {"what": "no such prompt file", "why": "", "next": "name another"},
    }
    assert "no such prompt file · name another" in capsys.readouterr().err
    assert not list((tmp_path / "home" / "sessions").glob("*"))
    assert not (tmp_path / "new").exists()


def test_a_command_that_is_wrong_in_a_session_that_was_there_takes_nothing_back(tmp_path):
    headless(tmp_path)

    class Wrong(ScriptedWork):
        async def run(self, _job, _helpers):
            raise UsageError("no such helper")

    before = read_state(SessionFolder(tmp_path / "session"))
    code = execute(START, Plan("run"), session=tmp_path / "session", json_place=None, make_work=Wrong)
    assert code == ExitCode.USAGE
    assert read_state(SessionFolder(tmp_path / "session")).runs == before.runs
