"""What the screens say: never green for what was not compared, always with the next step."""

import pytest
import recorded

from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.log import read_log
from klbench.session.state import HelperState, fold
from klbench.tui import wording
from klbench.tui.measurement import measure
from klbench.tui.screens.origin import evidence_lines, finding_line, no_finding, progress_bar, read_map
from klbench.tui.screens.tokens import describe_shape


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
    said = wording.sentences(state, live=False, now=state.at, request=5)
    assert said[0].startswith("Only requests with cached tokens")
    assert said[1] == "Looks like two different computations (condition 2) · probable"
    assert said[2] == "Next: locate the origin in request 5, the one under the cursor · press o"
    located = state.located[0]
    known = wording.sentences(state, live=False, now=state.at, request=located.request, located=located)
    assert known[2].startswith(
        f"Origin of request {located.request}: model.layers.1.self_attn.attn (probable)"
    )


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


def test_a_dead_server_shows_its_own_last_words(tmp_path):
    recorder = recorded.start(tmp_path / "s")
    recorder.add(ev.ServerEnded(expected=False, exit_code=1, why="the scheduler died", last_lines=["OOM"]))
    said = wording.sentences(state_of(recorder.folder), live=True, now=0.0)
    assert said == [
        "✗ The server failed: the scheduler died",
        "its last words: OOM",
        "Next: look at its log · press l",
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
    assert line == " PROBABLE  state_restore or operator  model.layers.1.self_attn.attn  row 267  extend"
    said = " ".join(evidence_lines(result))
    assert "Masked, in its causal cone and not judged: model.layers.1.self_attn.o_proj" in said
    assert "Capture changed no logprob." in said
    refused = {"alignment": {"proved": False, "reason": "token 9 differs"}}
    assert no_finding(refused) == " NOT ALIGNED  token 9 differs"


def test_progress_never_passes_its_end():
    assert progress_bar(5, 10, 10) == "█████░░░░░  50 %"
    assert progress_bar(15, 10, 10) == "██████████  100 %"
    assert progress_bar(5, 0, 10) == ""


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
