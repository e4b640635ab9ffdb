"""A run that is measured again to look further into it, one after its code was edited: what still holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeBench

from klbench.cli.headless import Plan, _exit_code
from klbench.errors import ExitCode
from klbench.session import bench as benches
from klbench.session import events as ev
from klbench.session.documents import locate_document, locate_exit_code, run_exit_code
from klbench.session.folder import SessionFolder, make_session
from klbench.session.log import Entry
from klbench.session.not_checked import not_checked
from klbench.session.report import gather
from klbench.session.report_content import blocks, summary
from klbench.session.report_markdown import markdown
from klbench.session.request import Options, StartRequest, Target
from klbench.session.serving import Serving
from klbench.session.state import SessionState, fold
from klbench.session.survey import found_in_words

FINDING = {
    "kind": "operator",
    "kinds": ["operator"],
    "module": "model.layers.1.self_attn.o_proj",
    "grade": "confirmed",
    "latent": False,
    "evidence": [],
}
HELPERS = ["match", "prefill_cache_hit", "decode_cache_hit"]


class Job:
    def progress(self, *_: Any) -> None: ...

    async def ask(self, *_: Any) -> None: ...


class Session:
    """Folds what is emitted, as a runner does."""

    def __init__(self, folder: SessionFolder) -> None:
        self.folder = folder
        target = Target(kind="launch", model_path="/models/tiny")
        self.start = StartRequest(target=target, options=Options(max_new_tokens=4))
        self.state = SessionState()

    def emit(self, event: ev.Event) -> Entry:
        entry = Entry(self.state.seq + 1, 100.0 + self.state.seq, event)
        self.state = self.state.apply(entry)
        return entry


class AgainBench(FakeBench):
    """Locating starts the server again, as a capture of one with CUDA graphs does."""

    async def _side(self, job: Any, relaunch: bool) -> Any:
        await Serving.relaunch(self, job, relaunch)
        return self.fake, None, "digest"

    async def _start(self, *_: Any) -> Any:
        return self.fake

    async def close(self) -> None:
        self._measured.clear()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgainBench:
    async def found(session: Any, _job: Any, _side: Any, _backend: str, chosen: Any, *_: Any) -> None:
        number = 1 + len(session.state.located)
        result = {"findings": [FINDING]}
        session.emit(
            ev.Located(
                locate=number, run=chosen.run, helper=chosen.helper, request=0, result=result, elapsed_s=1.0
            )
        )

    monkeypatch.setattr(benches, "trace_and_locate", found)
    folder = make_session(tmp_path / "session", {"kind": "launch", "model_path": "/models/tiny"}, {})
    return AgainBench(Session(folder))


def done(bench: AgainBench, *jobs: Any) -> SessionState:
    async def work() -> None:
        for job in jobs:
            await job()

    asyncio.run(work())
    return bench._session.state


def run(bench: AgainBench) -> Any:
    return lambda: bench.run(Job(), ())  # type: ignore[arg-type]


def locate(bench: AgainBench, helper: str | None = None) -> Any:
    return lambda: bench.locate(Job(), helper, None, True)  # type: ignore[arg-type]


def relaunch(bench: AgainBench) -> Any:
    return lambda: bench.relaunch(Job(), True)  # type: ignore[arg-type]


def test_what_locating_measures_again_keeps_the_other_helpers_and_what_is_known(bench: AgainBench) -> None:
    state = done(bench, run(bench), locate(bench, "prefill_cache_hit"))

    assert [r.again_of for r in state.runs] == [None, 1]
    assert state.run is not None
    assert [h.helper for h in state.run.helpers] == HELPERS
    assert [h.columns for h in state.run.helpers] == [
        "runs/1-match.npz", "runs/2-prefill_cache_hit.npz", "runs/1-decode_cache_hit.npz",
    ]  # fmt: skip
    shown = locate_document(Path("/s"), state, state.run, state.located_now)
    assert set(shown["statuses"]) == set(HELPERS)
    assert not [note for note in not_checked(state) if "was not asked for" in note]
    said = markdown(blocks(gather(bench._session.folder.path, state)))
    assert "Run 1 measured again" in said
    assert "as it was measured there: match, decode_cache_hit." in said.replace("\\", "")
    # All three helpers and the finding are judged together.
    told = [item["values"]["helper"] for item in shown["verdict"]["evidence"] if item["code"] == "helper"]
    assert told == HELPERS
    assert any(fact["code"] == "finding" for h in shown["verdict"]["hypotheses"] for fact in h["for"])


def test_what_was_found_and_tried_before_still_counts_when_it_is_measured_again(bench: AgainBench) -> None:
    outcome = {"name": "repeats", "outcome": "same_bits", "text": "5 repeats are bit-identical", "values": {}}
    state = done(bench, run(bench), locate(bench))
    made = ev.ExperimentEnded(
        experiment=1, run=state.run.number, helper="match", name="repeats", result=outcome, elapsed_s=1.0
    )  # fmt: skip
    bench._session.emit(made)
    state = done(bench, locate(bench))

    assert [r.again_of for r in state.runs] == [None, 1, 2]
    assert len(state.located_of(state.run)) == 2
    assert [one.name for one in state.experiments_of(state.run)] == ["repeats"]


def test_a_server_that_the_user_starts_again_may_run_edited_code(bench: AgainBench) -> None:
    state = done(bench, run(bench), locate(bench), relaunch(bench), locate(bench))

    assert [r.again_of for r in state.runs] == [None, 1, None]
    assert [h.helper for h in state.run.helpers] == ["match"]
    assert [one.run for one in state.located_of(state.run)] == [3]


def clean_after_an_origin() -> SessionState:
    """A run that diverged and was located, then, after the code was mended, a clean one."""
    diverged = {"status": "diverged", "tokens": 4, "divergent_tokens": 4}
    clean = {"status": "clean", "tokens": 4, "divergent_tokens": 0}
    story: list[ev.Event] = []
    for number, result in ((1, diverged), (2, clean)):
        story += [
            ev.RunStarted(run=number, helpers=["match"], prompts={"count": 1}, options={}),
            ev.HelperEnded(run=number, helper="match", result=result, columns=None, elapsed_s=1.0),
            ev.RunEnded(run=number, verdict={}, elapsed_s=1.0, cancelled=False),
        ]
        if number == 1:
            story.append(
                ev.Located(
                    locate=1, helper="match", request=0, result={"findings": [FINDING]}, elapsed_s=1.0, run=1
                )
            )
    return fold(Entry(number, 100.0 + number, event) for number, event in enumerate(story, start=1))


def test_a_mended_server_is_not_told_of_by_its_old_origin(tmp_path: Path) -> None:
    state = clean_after_an_origin()

    assert state.latest_located is not None
    assert state.located_now is None
    assert run_exit_code(state.run) == ExitCode.CONSISTENT
    assert _exit_code(Plan("locate"), state) == ExitCode.CONSISTENT
    assert locate_exit_code(state.run, state.located_now) == ExitCode.CONSISTENT
    assert locate_document(tmp_path, state, state.run, state.located_now)["findings"] == []
    assert found_in_words(state) == "match clean"
    report = gather(tmp_path, state)
    assert "Origin" not in "".join(str(part) for part in summary(report))
    assert not [note for note in not_checked(state) if "o_proj" in note]


def test_a_log_that_leads_in_a_circle_ends() -> None:
    story = [
        ev.RunStarted(run=1, helpers=["match"], prompts={}, options={}, again_of=2),
        ev.RunStarted(run=2, helpers=["match"], prompts={}, options={}, again_of=1),
        ev.RunStarted(run=3, helpers=["match"], prompts={}, options={}, again_of=3),
    ]
    state = fold(Entry(number, float(number), event) for number, event in enumerate(story, start=1))
    assert [state.located_of(run) for run in state.runs] == [(), (), ()]
