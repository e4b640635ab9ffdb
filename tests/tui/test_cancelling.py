"""Long work is cancelled by Esc or ctrl+c after a question, and nothing is lost or left by accident."""

import pytest
from pilots import press, screen_text, scripted_runner, settle, workbench

from klbench.session import commands as cmd

QUESTION = "Cancel this? run the three helpers"


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_what_runs_is_cancelled_after_a_question(key, measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (app, pilot):
        text = await press(pilot, key)
        assert QUESTION in text
        assert "What it has measured is kept" in text
        assert told == []
        await press(pilot, "x")
        assert told == [cmd.Cancel()]
        assert app.return_code is None


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
@pytest.mark.parametrize("answer", ["c", "escape"])
async def test_it_goes_on_where_the_user_thinks_again(key, answer, measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (_app, pilot):
        text = await press(pilot, key, answer)
        assert QUESTION not in text
        assert "[2] requests" in text
        assert told == []


async def test_leaving_from_the_question_lets_it_go_on(measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (_app, pilot):
        await press(pilot, "escape")
        await pilot.press("l")
        await settle(pilot)
        assert told == [cmd.Detach()]


async def test_control_c_asks_on_every_screen_and_escape_there_only_goes_back(measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (_app, pilot):
        assert QUESTION in await press(pilot, "l", "ctrl+c")
        await press(pilot, "c")
        assert "[2] requests" in await press(pilot, "escape")
        assert told == []


async def test_control_c_twice_leaves_and_cancels_nothing(measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (app, pilot):
        await press(pilot, "ctrl+c")
        await pilot.press("ctrl+c")
        await settle(pilot)
        assert app.return_code == 0
        assert cmd.Cancel() not in told


@pytest.mark.parametrize("keys", [("escape",), ("escape", "escape", "escape"), ("ctrl+c",)])
async def test_where_nothing_runs_nobody_is_thrown_out(keys, finished):
    async with workbench(finished) as (app, pilot):
        text = await press(pilot, *keys)
        assert ("nothing is running" if keys[0] == "escape" else "press q to quit") in text
        assert app.return_code is None


async def test_a_job_that_ends_under_the_question_is_not_cancelled(measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (app, pilot):
        await press(pilot, "escape")
        app.model.live = False
        app.screen.dismiss("cancel")
        await settle(pilot)
        assert told == []
        assert "nothing to cancel" in screen_text(app)
