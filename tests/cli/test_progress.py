"""What a headless command says while it works, in words and as objects."""

import json

import pytest

from klbench.cli import main
from klbench.cli.failures import VOICE, note, value_of
from klbench.cli.progress import REPEAT_S, JsonProgress, Progress
from klbench.session import events as ev
from klbench.session.log import Entry
from tests.session.scripted import RESULT, SERVER


def said(*story, step_s=1.0):
    """The lines said about events that come `step_s` apart."""
    lines, now = [], [0.0]
    progress = Progress(say=lines.append, clock=lambda: now[0])
    for number, event in enumerate(story, start=1):
        now[0] += step_s
        progress(Entry(number, now[0], event))
    return lines


def arm_progress(done):
    return ev.ArmProgress(
        run=1, helper="match", arm="scoring", done=done, total=100, elapsed_s=1.0, eta_s=61.0
    )


def test_progress_of_one_arm_is_said_seldom():
    story = [arm_progress(done) for done in range(50)]
    assert said(*story, step_s=REPEAT_S / 5) == [
        f"match · scoring arm · {done} % · 1:01 left" for done in range(4, 50, 5)
    ]


def test_a_phase_is_said_once_when_it_begins():
    story = [ev.ServerPhase(phase="loading_weights", elapsed_s=float(s)) for s in (3, 4, 5)]
    assert said(*story) == ["server loading weights · 0:03"]


def test_a_helper_that_ran_says_its_numbers_and_one_that_did_not_says_why():
    ended = ev.HelperEnded(run=1, helper="match", result=RESULT, columns=None, elapsed_s=8.0)
    not_run = {**RESULT, "status": "not_run", "reason": "0 hits", "hits": None}
    other = ev.HelperEnded(run=1, helper="prefill_cache_hit", result=not_run, columns=None, elapsed_s=0.0)
    assert said(ended, other) == [
        "match · clean · cold 4/4 · 64 tokens · 0 differ · avg KL 0 · 0:08",
        "prefill_cache_hit · not_run · 0 hits · 0:00",
    ]


def test_a_server_that_is_attached_to_was_not_launched():
    ready = ev.ServerReady(server={**SERVER, "deterministic": False}, url="u", launch_s=0.0)
    (line,) = said(ready)
    assert line.startswith("attached · sglang 0.5.23")
    assert "NOT deterministic" in line


def test_what_a_run_will_miss_is_said_before_it_and_not_again_when_it_is_repeated():
    missed = [
        {"code": "no_batch", "text": "one request decodes alone", "advice": "--samples 32", "values": {}},
        {"code": "chunk_within_request", "text": "no chunk is crossed", "advice": None, "values": {}},
    ]
    started = ev.RunStarted(run=1, helpers=["match"], prompts={}, options={}, not_exercised=missed)
    again = ev.RunContinued(run=1, helpers=["match"], not_exercised=missed)
    assert said(started, again) == [
        "will not be exercised: one request decodes alone · --samples 32",
        "will not be exercised: no chunk is crossed",
    ]


def test_a_locate_job_says_each_of_its_phases():
    story = [ev.JobStarted(job=1, kind="locate", title="locate the origin")]
    story += [
        ev.JobProgress(job=1, phase=phase, done=0, total=0)
        for phase in ("converting", "converting", "localising")
    ]
    assert said(*story) == ["locate the origin", "converting", "localising"]


def test_how_long_it_should_take_is_said_once_at_the_beginning():
    assert said(
        ev.JobStarted(job=1, kind="run", title="run all"),
        ev.JobProgress(job=1, phase="starting the server", done=0, total=0, eta_s=21.0),
        ev.JobProgress(job=1, phase="match", done=0, total=3, eta_s=75.0),
        ev.JobProgress(job=1, phase="prefill_cache_hit", done=1, total=3, eta_s=50.0),
    ) == [
        "starting the server · about 0:21 by earlier sessions",
        "3 helpers · about 1:15 by earlier sessions",
    ]
    assert (
        said(
            ev.JobStarted(job=1, kind="run", title="run all"),
            ev.JobProgress(job=1, phase="match", done=0, total=3, eta_s=None),
        )
        == []
    )


def told(capsys, *story):
    """The objects said on stderr about events."""
    progress = JsonProgress(clock=lambda: 0.0)
    for number, event in enumerate(story, start=1):
        progress(Entry(number, 10.0 + number, event))
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def as_json():
    VOICE.as_json = True
    yield
    VOICE.as_json = False


@pytest.mark.usefixtures("as_json")
def test_a_machine_gets_the_numbers_of_what_is_said_and_the_ends_that_words_leave_out(capsys):
    ended = ev.HelperEnded(run=1, helper="match", result=RESULT, columns=None, elapsed_s=8.0)
    arm = ev.ArmEnded(run=1, helper="match", arm="scoring", elapsed_s=2.0)
    job = ev.JobEnded(job=1, outcome="done", elapsed_s=9.0)
    started = ev.ArmStarted(run=1, helper="match", arm="scoring", requests=4, tokens=64)
    texts = ev.TokenTexts(run=1, helper="match", file="x")
    found = told(capsys, started, arm, ended, texts, job)
    assert [line["type"] for line in found] == ["arm_started", "arm_ended", "helper_ended", "job_ended"]
    assert all(line["schema"] == "klbench.progress/1" for line in found)
    assert [line["seq"] for line in found] == [1, 2, 3, 5]
    assert found[0] | {"helper": "match", "arm": "scoring", "requests": 4, "tokens": 64} == found[0]
    assert found[2]["result"]["status"] == "clean"
    assert found[2]["text"].startswith("match · clean")
    assert not [value for value in found[2]["result"].values() if isinstance(value, (list, dict))]


@pytest.mark.usefixtures("as_json")
def test_what_comes_from_outside_is_ascii_in_an_object(capsys):
    note("a \x1b[31m\u202e的", what="\x9b")
    line = capsys.readouterr().err
    assert line.isascii()
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert json.loads(line)["text"] == "a \x1b[31m\u202e的"
    assert json.loads(line)["type"] == "note"


@pytest.mark.parametrize("option", [["--progress", "json"], ["--progress=json"]])
@pytest.mark.parametrize("wrong", [["run"], ["run", "--bogus"], ["locate", "--demo", "nothing"]])
def test_an_error_is_an_object_too_even_where_the_command_line_is_not_understood(option, wrong, capsys):
    assert main([*wrong, *option]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["error"]
    assert json.loads(lines[0]).keys() >= {"what", "why", "next", "text", "at", "schema"}
    assert main(wrong) == 2
    assert capsys.readouterr().err.startswith("klbench: ")


def test_what_belongs_to_sglang_is_not_ours():
    assert value_of("--progress", ["run", "--launch", "m", "--", "--progress", "json"]) is None
    assert value_of("--progress", ["run", "--progress", "words", "--progress=json"]) == "json"
    assert value_of("--progress", ["run", "--progress"]) is None
