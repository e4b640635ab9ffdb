"""What a result says nothing about stands in its document, with the command that would exercise it."""

from pathlib import Path
from typing import Any

import pytest

from klbench.session import events as ev
from klbench.session.documents import commands_to_repeat, locate_document, run_document
from klbench.session.log import Entry
from klbench.session.report import not_checked
from klbench.session.state import SessionState, fold

NO_GRAPHS = {"code": "no_graphs", "text": "CUDA graphs are off: not tested", "values": {"cuda_graphs": False}}
VERDICT = {
    "status": "none",
    "conditions": [],
    "grade": "probable",
    "evidence": [{"code": "all_equal", "text": "all equal", "values": {}}, NO_GRAPHS],
    "next": [],
}
PLACE = Path("/s")
WITH_GRAPHS = "klbench locate --samples 8 --no-ready-to-capture --launch /models/m -- --tp-size 2"


def state_of(
    target: dict[str, Any], verdict: dict[str, Any] = VERDICT, backend: str | None = None
) -> SessionState:
    """A session that measured on a server started eager; `backend`: what located a divergence of it."""
    options = {"samples": 8, "ready_to_capture": True}
    events: list[ev.Event] = [
        ev.RunnerStarted(klbench_version="0.1.0", pid=1, host="h", target=target, options=options),
        ev.RunStarted(run=1, helpers=["match"], prompts={"count": 8}, options={}),
        ev.RunEnded(run=1, verdict=verdict, elapsed_s=1.0),
    ]
    if backend is not None:
        result = {"capture": {"backend": backend}, "findings": []}
        events.append(ev.Located(locate=1, run=1, helper="match", request=3, result=result, elapsed_s=1.0))
    return fold(Entry(number, 100.0 + number, event) for number, event in enumerate(events, start=1))


LAUNCHED = {
    "kind": "launch",
    "model_path": "/models/m",
    "arguments": ["--disable-cuda-graph", "--tp-size", "2", "--cuda-graph-backend-decode", "disabled"],
}


def test_a_clean_result_names_the_command_that_would_exercise_graphs() -> None:
    state = state_of(LAUNCHED)
    expected = [{**NO_GRAPHS, "command": WITH_GRAPHS}]
    assert locate_document(PLACE, state, state.run, None)["not_exercised"] == expected
    assert run_document(PLACE, state, state.run)["not_exercised"] == expected
    assert ("exercise what was not: CUDA graphs are off", WITH_GRAPHS) in commands_to_repeat(state, PLACE)
    assert "CUDA graphs are off: not tested." in not_checked(state)


@pytest.mark.parametrize("target", [{"kind": "url", "url": "http://127.0.0.1:1"}, {}, {"kind": "strange"}])
def test_a_server_that_is_not_ours_to_start_gets_no_command(target: dict[str, Any]) -> None:
    state = state_of(target)
    assert run_document(PLACE, state, state.run)["not_exercised"] == [NO_GRAPHS]
    assert not any("exercise" in step for step, _ in commands_to_repeat(state, PLACE))


def test_what_was_exercised_or_is_no_evidence_is_not_listed() -> None:
    evidence = [
        {"code": "restored", "text": "restored", "values": {}},
        {"code": "cold", "text": "match is cold", "values": {"helper": "match"}},
        "strange",
        {"code": ["no_graphs"], "text": "strange"},
    ]
    state = state_of(LAUNCHED, {**VERDICT, "evidence": evidence})
    assert run_document(PLACE, state, state.run)["not_exercised"] == []
    assert run_document(PLACE, state, None)["not_exercised"] == []


def test_what_was_seen_with_graphs_alone_is_repeated_with_graphs() -> None:
    seen = {**VERDICT, "status": "found", "evidence": []}
    for backend, flag in (("state", True), ("digest", False)):
        commands = dict(commands_to_repeat(state_of(LAUNCHED, seen, backend), PLACE))
        assert ("--no-ready-to-capture" in commands["locate the origin"]) == flag
