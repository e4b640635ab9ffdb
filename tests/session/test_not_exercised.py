"""What a result says nothing about is said before its run, and stands in its document, with what would
exercise it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from klbench.cli.headless import Plan, execute
from klbench.session import events as ev
from klbench.session.documents import commands_to_repeat, locate_document, run_document
from klbench.session.folder import SessionFolder
from klbench.session.log import Entry
from klbench.session.reading import read_state
from klbench.session.report import not_checked
from klbench.session.request import Options, StartRequest, Target
from klbench.session.state import SessionState, fold
from tests.session.fake_engine import FakeBench

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


# Before a run.


class SmallBench(FakeBench):
    """Its server has a window, chunks and checkpoints that three short prompts do not reach."""

    def __init__(self, session: Any, **facts: Any) -> None:
        super().__init__(session)
        known = {"sliding_window": 64, "chunked_prefill_size": 512, "checkpoint_interval": 256}
        self.fake.facts = dataclasses.replace(self.fake.facts, **{**known, **facts})


@pytest.mark.usefixtures("places")
def test_a_run_says_before_its_first_arm_what_it_will_not_put_to_the_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = Options(samples=3, max_new_tokens=6, helpers=("match", "prefill_cache_hit"))
    start = StartRequest(target=Target(kind="demo", model="dense"), options=options)
    work = functools.partial(SmallBench, radix_cache=False)
    execute(start, Plan("run"), session=tmp_path / "s", json_place=None, make_work=work)
    lines = capfd.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("will not be exercised: ")]
    assert [line.rpartition(" · ")[2] for line in said] == [
        "use longer prompts: --prompt-tokens 128",
        said[1],
        "generate more: --max-new-tokens 256",
        "start the server with an attention backend that keeps the radix cache",
    ]
    assert "no request is longer than a prefill chunk of 512 tokens" in said[1]
    assert "--chunked-prefill-size 2, would be cut" in said[1]
    assert lines.index(said[-1]) < lines.index("at match generation")
    (run,) = read_state(SessionFolder(tmp_path / "s")).runs
    assert [item["code"] for item in run.will_miss] == [
        "window_not_crossed",
        "chunk_within_request",
        "checkpoint_not_crossed",
        "no_restore",
    ]


def test_what_a_run_will_miss_follows_the_server_that_it_goes_on_with() -> None:
    one, other = ({"code": code, "text": code, "values": {}, "advice": None} for code in ("one", "other"))
    events: list[ev.Event] = [
        ev.RunStarted(run=1, helpers=["match"], prompts={}, options={}, not_exercised=[one]),
        ev.RunContinued(run=1, helpers=["match"], not_exercised=[other]),
    ]
    entries = [Entry(number, 100.0 + number, event) for number, event in enumerate(events, start=1)]
    assert fold(entries[:1]).runs[0].will_miss == (one,)
    assert fold(entries).runs[0].will_miss == (other,)
