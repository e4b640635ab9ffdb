"""The state is a pure fold: same events, same snapshot."""

from hypothesis import given
from hypothesis import strategies as st

from klbench.session import events as ev
from klbench.session.log import Entry
from klbench.session.state import SessionState, fold, without_runner

RESULT = {"status": "diverged", "tokens": 4096, "divergent_tokens": 512}
STORY = [
    ev.RunnerStarted(klbench_version="1", pid=7, host="h", target={"kind": "demo"}, options={"samples": 32}),
    ev.JobStarted(job=1, kind="launch", title="start the server"),
    ev.ServerStarting(command="python -m sglang", log="server/server.log", ready_to_capture=True, fault="f"),
    ev.ServerPhase(phase="importing", elapsed_s=1.0),
    ev.ServerPhase(phase="importing", elapsed_s=2.0),
    ev.ServerReady(server={"page_size": 1}, url="http://127.0.0.1:1", launch_s=21.0),
    ev.JobEnded(job=1, outcome="done", elapsed_s=21.0),
    ev.JobStarted(job=2, kind="run", title="run"),
    ev.RunStarted(run=1, helpers=["match", "prefill_cache_hit"], prompts={"count": 32}, options={}),
    ev.ArmStarted(run=1, helper="match", arm="generation", requests=32, tokens=100),
    ev.ArmProgress(run=1, helper="match", arm="generation", done=40, total=100, elapsed_s=1.0, eta_s=2.0),
    ev.ArmEnded(run=1, helper="match", arm="generation", elapsed_s=3.0),
    ev.HelperEnded(run=1, helper="match", result=RESULT, columns="runs/1-match.npz", elapsed_s=4.0),
    ev.TokenTexts(run=1, helper="match", file="runs/1-match-texts.json"),
    ev.ArmStarted(run=1, helper="prefill_cache_hit", arm="warming", requests=32, tokens=100),
    ev.RunEnded(run=1, verdict={"status": "found"}, elapsed_s=9.0, cancelled=True),
    ev.JobEnded(job=2, outcome="cancelled", elapsed_s=9.0),
    ev.Located(locate=1, helper="match", request=3, result={"findings": []}, elapsed_s=2.0, run=1),
    ev.Asked(what="flush it", why="others use it"),
    ev.Answered(yes=True),
    ev.Trouble(level="warning", what="slow"),
    ev.Call(line="curl", outcome="200", elapsed_s=0.1),
    ev.ReportWritten(files=["reports/a.md"]),
    ev.ServerEnded(expected=False, exit_code=137, why="killed", last_lines=["out of memory"]),
    ev.Unknown(name="newer"),
]
ENTRIES = [Entry(number, 100.0 + number, event) for number, event in enumerate(STORY, start=1)]


def after(event_type, nth=1):
    """The state right after the nth event of that type."""
    seen = 0
    for index, event in enumerate(STORY):
        seen += isinstance(event, event_type)
        if seen == nth:
            return fold(ENTRIES[: index + 1])
    raise AssertionError(event_type)


@given(st.integers(0, len(ENTRIES)))
def test_folding_in_two_steps_gives_what_one_step_gives(cut):
    assert fold(ENTRIES[cut:], fold(ENTRIES[:cut])) == fold(ENTRIES)


@given(st.lists(st.sampled_from(STORY), max_size=30))
def test_events_in_any_order_never_break_a_reader(story):
    entries = [Entry(number, float(number), event) for number, event in enumerate(story, start=1)]
    state = fold(entries)
    assert state.seq == len(story)
    assert without_runner(state).job is None or not state.runner.alive


def test_the_job_in_progress_is_known_until_it_ends():
    assert after(ev.JobStarted).job.title == "start the server"
    ended = after(ev.JobEnded)
    assert ended.job is None
    assert (ended.last_job.kind, ended.last_job.outcome) == ("launch", "done")


def test_a_phase_seen_again_keeps_the_time_at_which_it_began():
    state = after(ev.ServerPhase, nth=2)
    assert (state.server.phase, state.server.phase_at, state.server.elapsed_s) == ("importing", 104.0, 2.0)


def test_a_ready_server_tells_what_is_in_force_and_what_the_launch_cost():
    server = after(ev.ServerReady).server
    assert server.ready
    assert (server.facts, server.launch_s, server.fault) == ({"page_size": 1}, 21.0, "f")


def test_what_the_server_said_is_kept_through_a_relaunch_that_never_becomes_ready():
    again = [
        ev.RunnerStarted(klbench_version="1", pid=8, host="h", target={"kind": "demo"}, options={}),
        ev.ServerStarting(command="again", log="server/other.log", ready_to_capture=True, fault=None),
        ev.ServerEnded(expected=True, exit_code=0, why="stopped", last_lines=[]),
    ]
    entries = [Entry(200 + number, 300.0 + number, event) for number, event in enumerate(again)]
    for end in range(1, len(entries) + 1):
        server = fold([*ENTRIES, *entries[:end]]).server
        assert server.facts == {"page_size": 1}
        assert not server.ready
    said = ev.ServerReady(server={"page_size": 16}, url="http://127.0.0.1:1", launch_s=20.0)
    assert fold([*ENTRIES, *entries[:2], Entry(210, 310.0, said)]).server.facts == {"page_size": 16}


def test_an_arm_shows_its_progress_and_ends_full():
    (arm,) = after(ev.ArmProgress).run.helper("match").arms
    assert (arm.done, arm.total, arm.eta_s, arm.ended) == (40, 100, 2.0, False)
    (arm,) = after(ev.ArmEnded).run.helper("match").arms
    assert (arm.done, arm.ended) == (100, True)


def test_helpers_are_waiting_running_or_judged_and_stopped_when_the_run_was_cancelled():
    def statuses(state):
        return [helper.status for helper in state.run.helpers]

    assert statuses(after(ev.RunStarted)) == ["waiting", "waiting"]
    assert statuses(after(ev.ArmStarted)) == ["running", "waiting"]
    assert statuses(after(ev.HelperEnded)) == ["diverged", "waiting"]
    assert statuses(after(ev.RunEnded)) == ["diverged", "stopped"]


def test_columns_and_texts_of_a_helper_are_named():
    helper = after(ev.TokenTexts).run.helper("match")
    assert (helper.columns, helper.texts) == ("runs/1-match.npz", "runs/1-match-texts.json")


def test_a_question_stands_until_it_is_answered():
    assert after(ev.Asked).question.what == "flush it"
    assert after(ev.Answered).question is None


def test_a_dead_server_leaves_its_last_words_and_everything_measured():
    state = after(ev.ServerEnded)
    assert state.server.phase == "failed"
    assert state.server.ended.last_lines == ("out of memory",)
    assert state.run.helper("match").result == RESULT


def test_a_killed_runner_leaves_nothing_in_progress():
    state = without_runner(after(ev.ArmProgress))
    assert not state.runner.alive
    assert state.job is None
    assert state.run.helper("match").status == "stopped"
    assert state.server.phase == "stopped"


def test_a_continued_session_keeps_runs_and_the_price_of_a_launch():
    state = fold([Entry(99, 500.0, STORY[0])], after(ev.HelperEnded))
    assert state.runner.alive
    assert state.server.phase == "none"
    assert state.server.launch_s == 21.0
    assert state.run.helper("match").result == RESULT


def test_an_event_that_is_not_understood_is_counted():
    assert fold(ENTRIES).unknown_events == 1
    assert SessionState().unknown_events == 0
