"""What the screens say: never green for what was not compared, always with the next step."""

import pytest
import recorded
from msgspec.structs import replace
from pilots import press, screen_text, scripted_runner, workbench

from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.log import read_log
from klbench.session.state import HelperState, fold
from klbench.tui import wording
from klbench.tui.measurement import measure
from klbench.tui.origin_words import evidence_lines, finding_line, no_finding, progress_bar, read_map
from klbench.tui.screens.tokens import describe_shape
from klbench.tui.verdict_words import evidence_paragraphs


def state_of(path):
    return fold(read_log(SessionFolder(path).events))


def test_a_helper_that_was_not_compared_says_why_and_shows_no_number():
    not_run = HelperState("match", result={"status": "not_run", "reason": "radix cache off", "tokens": 0})
    assert wording.helper_line(not_run, 0.0, 100).split() == ["match", "not", "run", "radix", "cache", "off"]
    nothing = HelperState("match", result={"status": "clean", "tokens": 0})
    assert "nothing was compared" in wording.helper_line(nothing, 0.0, 100)


def test_nan_and_dropped_requests_come_before_the_tail():
    result = recorded.result(recorded.columns("match", dirty=False)) | {"nan_count": 3, "dropped": 2}
    line = wording.helper_line(HelperState("match", result=result), 0.0, 100)
    assert "3 NaN" in line
    assert "2 dropped" in line


@pytest.mark.parametrize("width", [60, 76, 100, 200])
def test_a_helpers_line_is_cut_only_at_words(width, finished):
    for helper in state_of(finished).run.helpers:
        whole = wording.helper_line(helper, 0.0, 400)
        line = wording.helper_line(helper, 0.0, width)
        assert whole.startswith(line)
        assert whole[len(line) : len(line) + 1] in ("", " ")


def test_a_running_arm_shows_how_far_it_is_how_long_and_how_long_still(measuring):
    state = state_of(measuring)
    line = wording.helper_line(state.run.helpers[1], state.at, 76)
    assert "generation  41 %  1680/4096" in line
    assert "0:38 left" in line


def test_the_verdict_is_a_sentence_with_its_grade_and_the_next_step(finished):
    state = state_of(finished)
    said = wording.sentences(state, live=False, now=state.at, todo="locate the origin · press o")
    assert said[0].startswith("Only requests with cached tokens")
    assert said[1] == "Found: different function (condition 2) · probable"
    assert said[2] == "Next: locate the origin · press o"
    located = state.located[0]
    known = wording.sentences(state, live=False, now=state.at, todo="anything", located=located)
    assert known[2].startswith(
        f"Origin of request {located.request}: model.layers.1.self_attn.attn (probable)"
    )


MISSED = [
    {"code": "no_graphs", "text": "graphs are off", "values": {}, "advice": "--no-ready-to-capture"},
    {"code": "of_a_newer_log", "text": "another thing", "values": {}, "advice": None},
]


def test_while_a_run_goes_on_it_is_said_what_it_will_not_exercise(measuring):
    state = state_of(measuring)
    usual = wording.sentences(state, live=True, now=state.at)
    run = replace(state.run, will_miss=tuple(MISSED))
    said = wording.sentences(replace(state, runs=(run,)), live=True, now=state.at)
    assert said[:-1] == usual[:-1]
    assert said[-1] == usual[-1] + (" Will not be exercised: CUDA graphs, of a newer log; v says what would.")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_verdict_screen_says_before_the_verdict_what_would_exercise_it(tmp_path, size):
    session = recorded.measuring(tmp_path / "s", MISSED)
    async with scripted_runner(session), workbench(session, size=size, readonly=False) as (_, pilot):
        assert "CUDA graphs, of a newer log; v says" in " ".join(screen_text(pilot.app).split())
        shown = await press(pilot, "v")
    assert "RUN 1 · no verdict before its end" in shown
    below = shown.partition("WILL NOT BE EXERCISED BY THIS RUN")[2]
    assert "▸ graphs are off · --no-ready-to-capture" in below
    assert "▸ another thing" in below


def test_the_verdict_says_what_was_missed_and_no_longer_what_would_be(finished):
    state = state_of(finished)
    run = replace(state.run, will_miss=tuple(MISSED))
    assert "WILL NOT BE EXERCISED" not in str(evidence_paragraphs(run, state.server))


def test_an_error_is_what_why_and_next_until_something_new_was_measured(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorded.launch(recorder)
    recorder.add(ev.Trouble(level="error", what="port taken", why="pid 4 holds it", next="choose another"))
    state = state_of(recorder.folder)
    assert wording.sentences(state, live=True, now=0.0) == [
        "✗ port taken",
        "pid 4 holds it",
        "Next: choose another",
    ]
    recorded.begin_run(recorder)
    assert "port taken" not in "".join(wording.sentences(state_of(recorder.folder), live=True, now=0.0))


@pytest.mark.parametrize(("kind", "covers"), [("replay", False), ("report", False), ("run", True),
                                              ("relaunch", True)])  # fmt: skip
def test_only_an_error_that_leaves_nothing_to_measure_with_stands_before_a_verdict(finished, kind, covers):
    judged = wording.sentences(state_of(finished), live=True, now=0.0)
    recorder = recorded.Recorder(finished, at=recorded.BEGAN_AT + 500, seq=500)
    recorder.add(ev.JobStarted(job=9, kind=kind, title="it"))
    recorder.add(ev.Trouble(level="error", what="it cannot be"))
    for _ in range(2):
        said = wording.sentences(state_of(finished), live=True, now=0.0)
        assert said == (["✗ it cannot be"] if covers else judged)
        recorder.add(ev.JobEnded(job=9, outcome="failed", elapsed_s=0.1))


def test_a_dead_server_shows_its_own_last_words(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorder.add(ev.ServerEnded(expected=False, exit_code=1, why="the scheduler died", last_lines=["OOM"]))
    said = wording.sentences(state_of(recorder.folder), live=True, now=0.0)
    assert said == [
        "✗ The server failed: the scheduler died",
        "its last words: OOM",
    ]


def test_a_launch_shows_its_phases_and_what_the_server_said_last(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorder.add(ev.ServerStarting(command="x", log="server/server.log", ready_to_capture=True))
    recorder.add(ev.ServerPhase(phase="loading_weights", elapsed_s=9.0))
    lines = wording.launch_words(state_of(recorder.folder), ["one", "two", "three"], recorder.at + 4)
    assert "✓ importing" in lines
    assert "▸ loading weights  0:04" in lines
    assert "· warming up" in lines
    assert lines[-2:] == ["two", "three"]


def test_not_deterministic_and_radix_off_are_shouted(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    facts = recorded.FACTS | {"deterministic": False, "radix_cache": False}
    recorder.add(ev.ServerReady(server=facts, url="http://x", launch_s=1.0))
    title = wording.title(state_of(recorder.folder), "", 120)
    assert "NOT deterministic" in title
    assert "radix OFF" in title


def test_a_masked_operator_is_named_once_however_many_phases_hide_it():
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(1, 7)]
    masked = [{"module": name, "phase": phase} for name in names for phase in ("extend", "decode")]
    assert evidence_lines({"masked": masked[:4]}) == [
        f"Masked, in its causal cone and not judged: {names[0]}, {names[1]}"
    ]
    assert evidence_lines({"masked": masked}) == [
        f"Masked, in its causal cone and not judged: {', '.join(names[:4])} and 2 more"
    ]


def test_a_map_that_is_not_one_is_no_map():
    good = {"layers": ["0", "head"], "positions": [4, 5], "cells": [[0, 3], [-1, 2]]}
    labels, positions, cells = read_map(good)
    assert labels == ("layer 0", "head")
    assert positions.tolist() == [4, 5]
    assert cells.tolist() == [[1, 4], [0, 3]]
    for broken in (
        None, 3, {}, {**good, "cells": [[0]]}, {**good, "cells": [[0, 9], [0, 0]]}, {**good, "cells": "xx"},
        {**good, "positions": ["a", "b"]}, {**good, "cells": [[0, 1], [2]]},
        {**good, "cells": [[10**30, 0], [0, 0]]},
    ):  # fmt: skip
        assert read_map(broken)[0] == ()


def test_a_finding_says_all_kinds_that_remain_its_grade_and_its_row():
    result = recorded.located(4, "match")
    line = finding_line(result["findings"][0])
    assert line == " PROBABLE  state_restore or operator  model.layers.1.self_attn.attn  row 267, extend"
    said = " ".join(evidence_lines(result))
    assert "Masked, in its causal cone and not judged: model.layers.1.self_attn.o_proj" in said
    assert "Capture changed no logprob." in said
    refused = {"alignment": {"proved": False, "reason": "token 9 differs"}}
    assert no_finding(refused) == " NOT ALIGNED  token 9 differs"


def test_progress_never_passes_its_end():
    assert progress_bar(5, 10, 10) == "█████░░░░░  50 %"
    assert progress_bar(15, 10, 10) == "██████████  100 %"
    assert progress_bar(5, 0, 10) == ""
    assert progress_bar(0, 10, 10) == ""


def test_the_shape_of_the_differences_is_told_apart():
    dirty = recorded.columns("prefill_cache_hit", dirty=True, samples=1)
    decode = dirty.decode_nats

    def with_differences(offsets):
        prefill = decode.copy()
        prefill[offsets] -= 0.01
        return measure(
            1, type(dirty)(**{f: getattr(dirty, f) for f in dirty.__slots__} | {"prefill_nats": prefill})
        )

    assert "bit for bit" in describe_shape(with_differences([]), 0)[0]
    assert describe_shape(with_differences(slice(None)), 0)[0].startswith("Contiguous from the first")
    later = describe_shape(with_differences([40, 41]), 0)
    assert f"token {int(dirty.prompt_len[0]) + 40}" in later[0]
    assert "2 of 128" in describe_shape(with_differences([0, 9]), 0)[0]


@pytest.mark.parametrize("width", [60, 70, 80, 120, 160])
def test_what_it_is_doing_ends_with_a_whole_word(width, measuring, finished):
    for session in (measuring, finished):
        state = state_of(session)
        whole = wording.status(state, 400, live=True, mark="", now=state.at)
        line = wording.status(state, width, live=True, mark="", now=state.at)
        assert len(line) <= width
        assert "…" not in line
        assert set(line.replace(",", " ").split()) <= set(whole.replace(",", " ").split())
    assert "3 of 3 helpers done in 0:17" in line
