"""What `klbench locate` prints where it names no origin."""

import pytest

from klbench.cli.table import locate_lines, run_lines

DOCUMENT = {
    "session": "/s",
    "helper": None,
    "findings": [],
    "masked": [],
    "alignment": None,
}


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({"match": "clean", "prefill_cache_hit": "not_run"}, "nothing to locate: match clean"),
        ({"match": "clean", "prefill_cache_hit": "diverged"}, "not located: match clean"),
        ({}, "nothing to locate: no helper was run"),
    ],
)
def test_a_divergence_that_could_not_be_captured_is_not_said_to_be_nothing(statuses, said):
    assert locate_lines(DOCUMENT | {"statuses": statuses})[0].startswith(said)


def test_what_a_clean_result_says_nothing_about_stands_beside_it():
    unseen = [
        {"code": "no_batch", "text": "one request alone", "values": {}},
        {"code": "no_graphs", "text": "CUDA graphs are off", "values": {}, "command": "klbench locate ..."},
    ]
    lines = locate_lines(DOCUMENT | {"statuses": {"match": "clean"}, "not_exercised": unseen})
    assert lines[1:4] == [
        "not exercised: one request alone",
        "not exercised: CUDA graphs are off",
        "  klbench locate ...",
    ]
    clean = {
        "session": "/s",
        "helpers": {},
        "verdict": {"status": "none"},
        "prompts": {},
        "not_exercised": unseen,
    }
    assert "not exercised: CUDA graphs are off" in run_lines(clean)


def test_where_no_helper_was_run_there_is_no_head_of_a_table():
    nothing = {"session": "/s", "helpers": {}, "verdict": {"status": "undecided"}, "prompts": {}}
    assert run_lines(nothing) == ["no helper was run", "session: /s"]
