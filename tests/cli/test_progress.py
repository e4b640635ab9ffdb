"""What a headless command says while it works."""

from klbench.cli.progress import REPEAT_S, Progress
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
