"""The command line: what it takes and what it refuses."""

import io
import json
import subprocess
import sys

import msgspec
import pytest

from klbench.cli import main, options
from klbench.cli.commands import klbench
from klbench.errors import ExitCode
from klbench.session import events as ev
from klbench.session.folder import Lock, make_session, new_session_path
from klbench.session.log import EventLog
from tests.session.scripted import DIVERGED, FINDING, SERVER, VERDICT


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))


@pytest.fixture
def request_of(monkeypatch):
    """The request that a command line makes, instead of the work."""
    made = []

    def keep(start, plan, **_):
        made.append((start, plan))
        return 0

    monkeypatch.setattr("klbench.cli.headless.execute", keep)

    def request(*arguments):
        assert main(list(arguments)) == 0
        return made[-1]

    return request


def test_demo_without_a_model_is_dense_and_its_prompts_are_short(request_of):
    start, _ = request_of("run", "--demo", "--samples", "4")
    assert (start.target.kind, start.target.model) == ("demo", "dense")
    assert (start.options.samples, start.options.prompt_tokens, start.options.max_new_tokens) == (4, 300, 512)
    assert not start.options.ready_to_capture


def test_a_fault_that_needs_it_gets_another_number_of_prompts(request_of):
    start, _ = request_of("run", "--demo", "--fault", "padding-scale")
    assert start.options.samples == 31
    start, _ = request_of("run", "--demo", "--fault", "padding-scale", "--samples", "12")
    assert start.options.samples == 12
    start, _ = request_of("run", "--demo", "--fault", "o_proj-rows")
    assert start.options.samples == 32


def test_a_launch_takes_long_prompts_and_sglangs_arguments_as_they_are(request_of):
    start, _ = request_of("run", "--launch", "org/model", "--", "--page-size", "16", "--json", "x", "--demo")
    assert start.target.model_path == "org/model"
    assert start.target.arguments == ("--page-size", "16", "--json", "x", "--demo")
    assert start.options.prompt_tokens == 3000


@pytest.mark.parametrize("command", ["run", "locate"])
def test_the_demos_server_takes_sglangs_arguments_too(request_of, command):
    for given in (["--demo"], ["--demo", "swa"]):
        start, _ = request_of(command, *given, "--", "--chunked-prefill-size", "128")
        assert start.target.arguments == ("--chunked-prefill-size", "128")


def test_each_commands_help_says_the_number_that_it_takes_by_default(request_of, capsys):
    for command, tokens in (("demo", 128), ("run", 512), ("locate", 512)):
        given = ["--json", "-"] if command == "demo" else ["--demo"]
        assert request_of(command, *given)[0].options.max_new_tokens == tokens
        assert main([command, "--help"]) == 0
        help_text = " ".join(capsys.readouterr().out.split())
        assert (
            f"[default: {tokens};" in help_text.partition("--max-new-tokens")[2].partition("--prompt-tok")[0]
        )


def test_the_demo_command_names_its_model_and_keeps_arguments_apart(request_of):
    start, plan = request_of("demo", "moe", "--json", "-", "--", "--page-size", "16")
    assert (start.target.model, start.target.arguments) == ("moe", ("--page-size", "16"))
    assert plan.what == "demo"
    start, _ = request_of("demo", "--json", "-", "--", "--page-size", "16")
    assert (start.target.model, start.target.arguments) == ("dense", ("--page-size", "16"))


def test_locate_launches_ready_to_capture_and_takes_one_request(request_of):
    start, plan = request_of("locate", "--demo", "--helper", "match", "--request", "5")
    assert start.options.ready_to_capture
    assert (plan.helper, plan.request) == ("match", 5)
    start, _ = request_of("locate", "--url", "http://127.0.0.1:1")
    assert not start.options.ready_to_capture


@pytest.mark.parametrize(
    ("command", "eager"), [("run", False), ("locate", True), ("census", True), ("experiment", False)]
)
def test_who_launches_eager_may_be_told_to_and_not_to(request_of, command, eager):
    names = ["repeats"] if command == "experiment" else []
    for option, expected in (
        ([], eager),
        (["--ready-to-capture"], True),
        (["--no-ready-to-capture"], False),
    ):
        start, _ = request_of(command, *names, "--demo", *option)
        assert start.options.ready_to_capture is expected


def test_paths_are_absolute_for_a_runner_that_lives_elsewhere(request_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, _ = request_of(
        "run", "--demo", "--prompts", "p.jsonl", "--trace-dir", "t", "--server-python", "b/python"
    )
    assert start.options.prompts == str(tmp_path / "p.jsonl")
    assert start.options.trace_dir == str(tmp_path / "t")
    assert start.options.server_python == str(tmp_path / "b/python")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "which server?"),
        (["run", "--demo", "--url", "http://x"], "exclude each other"),
        (["run", "--demo", "huge"], "dense, moe, swa, hybrid"),
        (["run", "--demo", "--helper", "mach"], "prefill_cache_hit"),
        (["run", "--demo", "--samples", "0"], "samples"),
        (["run", "--demo", "--fault", "nope"], "o_proj-rows"),
        (["run", "--demo", "--fault", "o_proj-rows:layer=99"], "layers 0 to 3"),
        (["run", "--demo", "--fault", "o_proj-rows:rows=0"], "at least 1"),
        (["run", "--demo", "hybrid", "--fault", "conv-zeroed:layer=1"], "it fits layer 0, 3"),
        (["run", "--demo", "--fault", "router-rows"], "it has in: moe"),
        (["run", "--demo", "--fault", "o_proj-rows:depth=3"], "depth"),
        (["run", "--demo", "--fault", "padding-scale", "--samples", "32"], "multiple of its pad=8"),
        (["locate", "--demo", "--fault", "restore-key", "--helper", "match"], "match makes none"),
        (["demo", "--fault", "decode-window", "--max-new-tokens", "4"], "3 decode steps"),
        (["run", "--launch", "m", "--fault", "o_proj-rows"], "demo only"),
        (["run", "--url", "http://x", "--", "--tp", "2"], "klbench launches"),
        (["run", "--url", "http://x", "--ready-to-capture"], "klbench launches"),
        (["locate", "--demo", "--request", "3"], "one --helper"),
        (["run", "--demo", "--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
        (["open", "nothing-here"], "no session"),
        (["report", "nothing-here"], "no session"),
        ([], "needs a terminal"),
    ],
)
def test_a_wrong_command_line_gives_2_and_says_what_is_right(arguments, words, capsys):
    assert main(arguments) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_a_wrong_command_line_still_writes_the_json(tmp_path, capsys):
    place = tmp_path / "result.json"
    assert main(["run", "--json", str(place)]) == ExitCode.USAGE
    assert json.loads(place.read_text())["error"]["what"] == "which server?"
    assert main(["run", "--demo", "--samples", "x", "--json=-"]) == ExitCode.USAGE
    assert "samples" in json.loads(capsys.readouterr().out)["error"]["what"]


def test_a_json_after_the_dashes_is_sglangs(tmp_path):
    place = tmp_path / "result.json"
    assert main(["run", "--", "--json", str(place)]) == ExitCode.USAGE
    assert not place.exists()


def test_a_defect_gives_70_a_crash_file_and_no_traceback(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise ZeroDivisionError("oh \x1b[31m")

    monkeypatch.setattr(options, "build_request", fail)
    assert main(["run", "--demo"]) == ExitCode.INTERNAL
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "\x1b" not in shown
    (crash,) = (tmp_path / "home").glob("crash-*.txt")
    assert "ZeroDivisionError" in crash.read_text()
    assert str(crash) in shown


def test_every_fault_is_explained(capsys):
    assert main(["demo", "--list-faults"]) == 0
    shown = capsys.readouterr().out
    for name in ("o_proj-rows", "restore-key", "decode-window"):
        assert name in shown


def recorded_session():
    folder = make_session(new_session_path("demo-dense"), {"kind": "demo", "model": "dense"}, {})
    with EventLog(folder.events) as log:
        for event in (
            ev.RunnerStarted(
                klbench_version="0.1.0",
                pid=1,
                host="elsewhere",
                target={"kind": "demo", "model": "dense"},
                options={"samples": 4},
            ),
            ev.ServerReady(server=SERVER, url="http://127.0.0.1:1", launch_s=2.0),
            ev.RunStarted(
                run=1, helpers=["match"], prompts={"source": "s", "count": 4, "sha256": "ab"}, options={}
            ),
            ev.HelperEnded(run=1, helper="match", result=DIVERGED, columns=None, elapsed_s=1.0),
            ev.RunEnded(run=1, verdict=VERDICT, elapsed_s=1.0),
            ev.Located(locate=1, helper="match", request=2, result={"findings": [FINDING]}, elapsed_s=1.0),
        ):
            log.append(event)
    return folder


def test_sessions_are_listed_with_what_they_found(capsys):
    assert main(["sessions"]) == 0
    assert "no sessions yet" in capsys.readouterr().out
    folder = recorded_session()
    assert main(["sessions"]) == 0
    shown = capsys.readouterr().out
    assert folder.name in shown
    assert "match diverged · origin model.layers.1.self_attn.o_proj" in shown
    assert main(["sessions", "--json", "-"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["sessions"]
    assert (listed["label"], listed["status"]) == ("demo-dense", "ended")


def test_open_without_a_terminal_prints_what_the_session_holds(capsys):
    folder = recorded_session()
    assert main(["open", folder.name]) == 0
    shown = capsys.readouterr().out
    assert "diverged" in shown
    assert "model.layers.1.self_attn.o_proj" in shown


def test_a_report_is_one_file_of_each_format(capsys):
    folder = recorded_session()
    assert main(["report", folder.name]) == 0
    markdown, page, data = capsys.readouterr().out.split()
    assert page.endswith(".html")
    assert markdown.endswith(".md")
    with open(data, encoding="utf-8") as file:
        assert json.load(file)["schema"] == "klbench.report/1"


def test_env_prints_exports_that_a_shell_takes(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out
    script = lines + "echo $KLBENCH_NONCE; echo $PYTHONPATH; echo ${SGLANG_PLUGINS-unset}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mine"}
    told = subprocess.run(["sh", "-euc", script], env=environment, capture_output=True, text=True, check=True)
    nonce, path, plugins = told.stdout.split()
    assert nonce in path
    assert path.endswith("/plugin:/mine")
    assert plugins == "unset"


@pytest.fixture
def workbench(monkeypatch):
    """A terminal, and what the workbench would be opened with."""
    opened = []

    def keep(**asked):
        opened.append(asked)
        return 0

    monkeypatch.setattr("klbench.cli.commands.why_no_terminal", lambda: "")
    monkeypatch.setattr("klbench.cli.commands.workbench", keep)
    return opened


def test_in_a_terminal_the_demo_and_a_bare_klbench_open_the_workbench(workbench):
    assert main([]) == 0
    assert main(["demo", "swa", "--fault", "restore-key"]) == 0
    bare, demo = workbench
    assert (bare["session"], bare["start"]) == (None, None)
    assert demo["start"]["target"] == {"kind": "demo", "model": "swa"}
    assert demo["start"]["options"]["fault"] == "restore-key"
    assert demo["start"]["options"]["max_new_tokens"] == 128


def test_a_session_is_opened_with_or_without_a_runner_so_that_it_can_be_continued_there(workbench):
    folder = recorded_session()
    assert main(["open", folder.name]) == 0
    with folder.locked():
        assert main(["open", folder.name]) == 0
        assert main(["open"]) == 0
    assert [(asked["session"], asked["readonly"]) for asked in workbench] == [(folder.path, False)] * 3


def test_without_a_terminal_open_lists_the_sessions_with_what_they_found(capsys):
    folder = recorded_session()
    assert main(["open"]) == 0
    shown = capsys.readouterr().out
    assert folder.name in shown
    assert "match diverged" in shown
    assert main(["open", "--json", "-"]) == ExitCode.USAGE


def test_a_runner_on_another_host_can_only_be_watched(workbench):
    folder = recorded_session()
    lock = Lock(host="elsewhere", pid=1, start="x")
    folder.lock_file.write_bytes(msgspec.json.encode(lock))
    assert main(["open", folder.name]) == 0
    assert workbench[0]["readonly"]


def test_every_command_has_help_that_names_what_it_does():
    for name, command in klbench.commands.items():
        assert command.help, name


def interrupted_session():
    """A session whose runner was killed in the middle of a helper."""
    folder = make_session(new_session_path("demo-dense"), {"kind": "demo", "model": "dense"}, {})
    with EventLog(folder.events) as log:
        for event in (
            ev.RunnerStarted(
                klbench_version="0.1.0",
                pid=1,
                host="h",
                target={"kind": "demo", "model": "dense"},
                options={},
            ),
            ev.ServerReady(server=SERVER, url="http://127.0.0.1:1", launch_s=21.0),
            ev.RunStarted(run=1, helpers=["match"], prompts={"source": "s", "count": 4}, options={}),
            ev.ArmStarted(run=1, helper="match", arm="scoring", requests=4, tokens=9),
        ):
            log.append(event)
    return folder


@pytest.fixture
def continued(monkeypatch):
    """The sessions that were continued."""
    asked = []

    async def keep(folder):
        asked.append(folder.path)
        return "run 1 goes on"

    monkeypatch.setattr("klbench.session.link.continue_session", keep)
    return asked


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_an_interrupted_run_is_offered_to_be_continued(
    workbench, continued, monkeypatch, capsys, answer, goes_on
):
    folder = interrupted_session()
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["open", folder.name]) == 0
    assert "run 1 was interrupted in match (scoring arm)" in capsys.readouterr().err
    assert bool(continued) == goes_on
    assert workbench[0]["session"] == folder.path


def test_open_continue_asks_nothing(workbench, continued):
    folder = interrupted_session()
    assert main(["open", "--continue", folder.name]) == 0
    assert continued == [folder.path]
    assert len(workbench) == 1


def test_without_a_terminal_an_interrupted_run_says_how_it_is_continued(capsys):
    folder = interrupted_session()
    assert main(["open", folder.name]) == 0
    assert f"continue it: klbench open --continue {folder.path}" in capsys.readouterr().out
    assert main(["sessions"]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_a_finished_session_has_nothing_to_continue(capsys):
    folder = recorded_session()
    assert main(["open", "--continue", folder.name]) == ExitCode.USAGE
    assert "klbench run --like" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--samples", "8"], ["--helper", "match"], ["--no-deterministic"]])
def test_a_session_alone_takes_no_options_that_make_it_another_experiment(capsys, more):
    folder = interrupted_session()
    for name in ("--session", "--like"):
        assert main(["run", name, str(folder.path), *more]) == ExitCode.USAGE
        assert f"{more[0]} would make it another experiment" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--session"], ["open", "--continue"]])
def test_a_session_alone_is_continued_with_what_it_was_started_with(monkeypatch, command):
    folder = interrupted_session()
    asked = []
    monkeypatch.setattr(
        "klbench.cli.headless.execute", lambda start, plan, **how: asked.append((start, plan, how)) or 0
    )
    assert main([*command, str(folder.path)]) == 0
    ((start, plan, how),) = asked
    assert (start.target.kind, start.target.model, plan.what) == ("demo", "dense", "run")
    assert how["session"] == folder.path


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:99999", "http://h:-1", "http://h:abc", "http://[::1", "http://a\nb", "ftp://h", "h"],
)
def test_an_address_that_cannot_be_one_is_a_usage_error_and_leaves_no_session(tmp_path, url, capsys):
    assert main(["run", "--url", url]) == ExitCode.USAGE
    assert "is not an address" in capsys.readouterr().err
    assert not list(tmp_path.rglob("session.json"))


@pytest.mark.parametrize("place", ["", "missing/x.json", "."])
def test_a_place_where_no_json_can_go_is_refused_before_the_work(tmp_path, monkeypatch, place, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--url", "http://127.0.0.1:9", "--json", place]) == ExitCode.USAGE
    assert "the JSON cannot be written to" in capsys.readouterr().err
    assert not list(tmp_path.rglob("session.json"))


def test_a_reader_that_leaves_is_no_divergence():
    command = [sys.executable, "-m", "klbench", "demo", "--list-faults"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == ExitCode.READER_GONE
