"""Once more: an interrupted session goes on, a measured one is repeated and set beside what it was; requests,
helpers and runs side by side."""

import dataclasses

import numpy as np
import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, workbench

from klbench.core.columns import HELPERS
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session import link
from klbench.session.columns import load_columns, save_columns
from klbench.session.folder import SessionFolder

FIRST = recorded.first_dirty("prefill_cache_hit")


def mended(path):
    """The same session after a fix: nothing differs any more."""
    recorder = recorded.start(path)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    for helper in HELPERS:
        recorded.run_helper(recorder, 1, helper, dirty=False)
    recorded.end_run(recorder)
    return path


@pytest.fixture
def interrupted(tmp_path):
    """A session whose run was cancelled behind its first helper."""
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    recorded.run_helper(recorder, 1, "match", dirty=False)
    recorder.add(ev.RunEnded(run=1, verdict={}, elapsed_s=3.0, cancelled=True))
    recorder.add(ev.JobEnded(job=1, outcome="cancelled", elapsed_s=3.0))
    return path


@pytest.fixture
def unmeasured(tmp_path):
    """A session whose server came up, and nothing else."""
    path = tmp_path / "20251129-dense"
    recorded.launch(recorded.start(path))
    return path


@pytest.fixture
def continued(monkeypatch):
    """The sessions that a new runner was started for."""
    paths = []

    async def continue_session(folder):
        paths.append(folder.path)
        return "it goes on in a new runner"

    monkeypatch.setattr(link, "continue_session", continue_session)
    return paths


@pytest.mark.parametrize("what", ["interrupted", "unmeasured"])
async def test_what_no_runner_brought_to_an_end_goes_on_with_a_new_one(what, continued, request):
    session = request.getfixturevalue(what)
    async with workbench(session, readonly=True) as (app, pilot):
        assert "u continue" in screen_text(app).splitlines()[-1]
        text = await press(pilot, "u")
        assert continued == [session]
        assert "it goes on in a new runner" in text
        assert not app.model.readonly


async def test_a_finished_session_has_nothing_to_continue_and_says_what_to_press(finished, continued):
    async with workbench(finished, size=(160, 45)) as (_app, pilot):
        text = await press(pilot, "u")
        assert "u continue" not in text.splitlines()[-1]
        assert "nothing was interrupted: press L to do the same once more" in text
        assert continued == []


@pytest.fixture
def started(monkeypatch):
    """The sessions whose server was started again."""
    paths = []

    async def start_server_again(folder):
        paths.append(folder.path)
        return "its server is started again"

    monkeypatch.setattr(link, "start_server_again", start_server_again)
    return paths


@pytest.mark.parametrize("what", ["interrupted", "unmeasured", "finished"])
async def test_the_server_of_a_session_without_a_runner_is_started_again(what, started, continued, request):
    session = request.getfixturevalue(what)
    async with workbench(session, readonly=True) as (app, pilot):
        text = await press(pilot, "U")
        assert (started, continued) == ([session], [])
        assert "its server is started again" in text
        assert not app.model.readonly


async def test_a_live_runner_is_told_to_start_its_server_again(finished):
    async with scripted_runner(finished) as told, workbench(finished, readonly=False) as (_app, pilot):
        await press(pilot, "U")
        assert told == [cmd.Relaunch()]


async def test_a_server_that_runs_is_not_started_twice(unmeasured):
    async with scripted_runner(unmeasured) as told, workbench(unmeasured, readonly=False) as (_app, pilot):
        assert "the server runs: r runs the helpers" in await press(pilot, "U")
        assert told == []


async def test_an_interrupted_run_goes_on_in_its_runner(interrupted):
    async with scripted_runner(interrupted) as told, workbench(interrupted, readonly=False) as (_app, pilot):
        text = await press(pilot, "u")
        assert told == [cmd.Continue()], text


async def test_where_nothing_was_interrupted_continue_says_what_to_press(finished):
    async with scripted_runner(finished) as told, workbench(finished, readonly=False) as (_app, pilot):
        assert "press r to run the helpers again" in await press(pilot, "u")
        assert told == []


async def test_a_bundle_can_only_be_read(finished, monkeypatch):
    monkeypatch.setattr("klbench.tui.model.is_unpacked", lambda _folder: True)
    async with workbench(finished, readonly=True) as (_app, pilot):
        assert "can only be read" in await press(pilot, "u")
        assert "klbench run --like 20251129-dense" in " ".join((await press(pilot, "L")).split())


async def test_the_same_once_more_is_set_beside_what_it_was(finished, tmp_path, monkeypatch, snapshot):
    started = []

    async def start_session(start):
        started.append(start)
        return SessionFolder(mended(tmp_path / "20251130-dense"))

    monkeypatch.setattr(link, "start_session", start_session)
    async with workbench(finished, readonly=True) as (app, pilot):
        await press(pilot, "L")
        await settle(pilot)
        (start,) = started
        assert start.target.model == "dense"
        assert start.options.helpers == HELPERS
        assert app.model.folder.name == "20251130-dense"
        text = await press(pilot, "B")
        assert "DIVERGED" not in text
        assert "diverged → clean" in text
        assert "better: divergences went, none came" in text
        for size in ((80, 24), (120, 40), (250, 70)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            snapshot(f"before_after-{size[0]}x{size[1]}", screen_text(app))
        await press(pilot, "down", "enter")
        text = screen_text(app)
        left = next(line for line in text.splitlines() if line.startswith(" left"))
        assert "run 1 before · prefill_cache_hit" in left
        assert left.endswith("session 20251129-dense")
        assert "left only, 0 right only" in text


async def test_a_live_session_is_asked_what_becomes_of_its_server(finished, tmp_path, monkeypatch):
    async def start_session(start):  # noqa: ARG001
        return SessionFolder(mended(tmp_path / "20251130-dense"))

    monkeypatch.setattr(link, "start_session", start_session)
    async with scripted_runner(finished) as told, workbench(finished, readonly=False) as (app, pilot):
        assert "stop this session's server first" in await press(pilot, "L")
        await press(pilot, "c")
        assert told == []
        await press(pilot, "L", "s")
        assert told == [cmd.Stop()]
        assert app.model.folder.name == "20251130-dense"


async def test_a_marked_request_is_beside_the_next_one(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        assert f"request {FIRST} of prefill_cache_hit is marked" in await press(pilot, "space")
        await press(pilot, "down")
        other = app.model.request
        text = await press(pilot, "c")
        lines = text.splitlines()
        assert f"prefill_cache_hit · request {FIRST}" in lines[1]
        assert "(marked)" in lines[1]
        assert f"prefill_cache_hit · request {other}" in lines[2]
        text = await press(pilot, "h")
        assert f"decode_cache_hit · request {FIRST}" in text.splitlines()[1]
        text = await press(pilot, "right_square_bracket")
        assert f"request {FIRST + 1}" in text.splitlines()[1]
        text = await press(pilot, "left_square_bracket", "left_square_bracket")
        assert f"request {FIRST - 1}" in text.splitlines()[1]
        assert "holds no other run" in await press(pilot, "R")


async def test_two_runs_of_a_session_are_set_side_by_side(finished):
    recorder = recorded.Recorder(finished, at=recorded.BEGAN_AT + 100, seq=500)
    recorder.add(ev.RunStarted(run=2, helpers=["match"], prompts={"count": 32}, options={}))
    recorded.run_helper(recorder, 2, "match", dirty=False)
    # One token of the second run has another decode logprob.
    file = finished / "runs" / "2-match.npz"
    columns = load_columns(file)
    decode = columns.decode_nats.copy()
    decode[5] += np.float32(0.25)
    save_columns(file, dataclasses.replace(columns, decode_nats=decode))
    recorder.add(ev.RunEnded(run=2, verdict={}, elapsed_s=3.0))
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        app.model.request = 0
        await press(pilot, "c", "R")
        text = screen_text(app)
        assert "run 1 · match · request 0" in text.splitlines()[1]
        assert "run 2 · match · request 0" in text.splitlines()[2]
        assert "0 differ in both, 0 left only, 1 right only" in text
        assert app.screen.query_one("#beside-table").row == 5
        assert "alike" not in await press(pilot, "n")
