"""Every screen at three sizes as text, and what its keys do.

The snapshots are plain files: a changed screen shows in a diff as what a user would see.
"""

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, workbench

from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.link import SessionSummary
from klbench.tui.actions import ACTIONS, of_screen
from klbench.tui.messages import MachineKnown, SessionsListed

SIZES = [(80, 24), (120, 40), (250, 70)]
FIRST = recorded.first_dirty("prefill_cache_hit")

# What to press on the finished session to come to each screen.
WAYS = {
    "main": [],
    "tokens": ["enter"],
    "origin": ["o"],
    "verdict": ["v"],
    "log": ["l"],
    "commands": ["at"],
    "help": ["question_mark"],
    "zoomed": ["z"],
}


def at(size) -> str:
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("size", SIZES, ids=at)
@pytest.mark.parametrize("name", WAYS)
async def test_screen_of_a_finished_session(name, size, finished, snapshot):
    async with workbench(finished, size=size) as (_app, pilot):
        snapshot(f"{name}-{at(size)}", await press(pilot, *WAYS[name]))


@pytest.mark.parametrize("size", SIZES, ids=at)
async def test_main_screen_while_a_helper_runs(size, measuring, snapshot):
    async with scripted_runner(measuring), workbench(measuring, size=size, readonly=False) as (app, _pilot):
        snapshot(f"measuring-{at(size)}", screen_text(app))


@pytest.mark.parametrize("size", SIZES, ids=at)
async def test_start_screen(size, tmp_path, snapshot):
    async with workbench(None, size=size) as (app, pilot):
        await app.workers.wait_for_complete()
        app.post_message(
            MachineKnown("no CUDA GPU: the demo runs on the CPU · sglang 0.5.23 (klbench's own)")
        )
        app.post_message(SessionsListed([summary(tmp_path)]))
        await settle(pilot)
        snapshot(f"start-{at(size)}", screen_text(app))
        for key, name in (
            ("2", "launch"),
            ("escape", None),
            ("3", "attach"),
            ("escape", None),
            ("4", "sessions"),
        ):
            text = await press(pilot, key)
            if name and size == (80, 24):
                snapshot(f"start-{name}-{at(size)}", text)


def summary(tmp_path) -> SessionSummary:
    return SessionSummary(
        folder=SessionFolder(tmp_path / "20251129-dense"),
        created_at=recorded.BEGAN_AT - 7200,
        label="demo-dense [/x]",
        status="running",
        doing="locate",
        found="match clean · prefill_cache_hit diverged",
        size_bytes=2_900_000,
    )


@pytest.mark.parametrize("size", SIZES, ids=at)
async def test_quit_dialog_of_a_live_session(size, finished, snapshot):
    async with scripted_runner(finished), workbench(finished, size=size, readonly=False) as (_app, pilot):
        snapshot(f"quit-{at(size)}", await press(pilot, "q"))


async def test_a_window_too_small_says_so_and_comes_back(finished):
    async with workbench(finished, size=(50, 14)) as (app, pilot):
        assert "at least 60 × 16" in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert "1 helpers" in screen_text(app)


async def test_every_number_of_columns_from_60_on_draws_without_a_clipped_border(finished):
    for width in (60, 66, 79, 100, 139, 140, 200):
        async with workbench(finished, size=(width, 24)) as (app, _pilot):
            lines = screen_text(app).splitlines()
            assert len(lines) == 24
            assert any(line.startswith("╭") and line.endswith("╮") and len(line) == width for line in lines)


async def test_divergent_requests_come_first_and_the_cursor_is_on_the_worst(finished):
    async with workbench(finished) as (app, _pilot):
        assert app.model.helper.helper == "prefill_cache_hit"
        assert app.model.request == FIRST


async def test_the_cursor_of_the_helpers_chooses_whose_requests_are_shown(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "1", "down")
        assert app.model.helper.helper == "decode_cache_hit"
        assert "2 requests · decode_cache_hit" in screen_text(app)
        await press(pilot, "up", "up")
        text = await press(pilot, "enter")
        assert "2 requests · match" in text
        assert "0 of 32 diverged" in text


async def test_next_and_previous_difference_go_around(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "enter")
        view = app.screen.query_one("TokenView")
        differing = view._differing.tolist()
        assert view.table.row == differing[0]
        await press(pilot, "n", "n")
        assert view.table.row == differing[2]
        await press(pilot, "N", "N", "N")
        assert view.table.row == differing[-1]
        assert "last again" in screen_text(app)


async def test_escape_goes_one_level_back_and_loses_nothing(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "down", "down", "enter", "v", "l")
        chosen = app.model.request
        await press(pilot, "escape", "escape", "escape")
        assert "2 requests" in screen_text(app)
        assert app.model.request == chosen != FIRST


async def test_the_log_follows_until_the_user_moves(finished):
    async with workbench(finished) as (app, pilot):
        assert "following" in await press(pilot, "l")
        assert "not following" in await press(pilot, "k")
        text = await press(pilot, "e")
        assert "![2025-11-29 19:27:34] RuntimeError" in text
        assert "· following" in await press(pilot, "f")
        assert app.screen.query_one("LogView").here is None


async def test_hostile_text_is_shown_and_acts_on_nothing(finished):
    seen = ""
    async with workbench(finished, size=(250, 70)) as (app, pilot):
        for keys in WAYS.values():
            seen += await press(pilot, *keys)
            while len(app.screen_stack) > 2:
                await press(pilot, "escape")
            if app.screen.has_class("has-zoom"):
                await press(pilot, "z")
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in seen)
    for shown in (
        "'[/INST]'",
        "'[bold red]'",
        "'[/b]'",
        "'的'",
        "'␛]0;owned␇'",
        "\\u200b",
        "\\u202e",
        "o_proj [/x]",
    ):
        assert shown in seen


async def test_run_cancel_report_and_locate_reach_the_runner(tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    recorded.run_helper(recorder, 1, "prefill_cache_hit", dirty=True)
    recorded.end_run(recorder)
    async with scripted_runner(path) as told, workbench(path, readonly=False) as (app, pilot):
        await press(pilot, "r", "e", "o")
        locate = cmd.Locate(helper="prefill_cache_hit", request=FIRST, relaunch=False)
        assert told == [cmd.Run(), cmd.Report(), locate]
        recorder.add(ev.JobStarted(job=2, kind="locate", title="locate the origin"))
        recorder.add(ev.JobProgress(job=2, phase="capturing", done=2, total=8, eta_s=9.0))
        await until(pilot, lambda: app.model.state.job is not None)
        text = screen_text(app)
        assert "2 of 8" in text
        assert "25 %" in text
        await press(pilot, "x")
        assert told[-1] == cmd.Cancel()
        assert "a locate is running" in await press(pilot, "escape", "r")


async def test_a_server_not_ready_to_capture_is_relaunched_only_after_asking(tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorder.add(ev.ServerStarting(command="x", log="server/server.log", ready_to_capture=False))
    recorder.add(ev.ServerReady(server=recorded.FACTS, url="http://127.0.0.1:1", launch_s=600.0))
    recorded.begin_run(recorder)
    recorded.run_helper(recorder, 1, "prefill_cache_hit", dirty=True)
    recorded.end_run(recorder)
    async with scripted_runner(path) as told, workbench(path, readonly=False) as (_app, pilot):
        assert "about 10:00" in await press(pilot, "o")
        await press(pilot, "c")
        assert told == []
        await press(pilot, "o", "r")
        assert told == [cmd.Locate(helper="prefill_cache_hit", request=FIRST, relaunch=True)]


async def test_what_the_runner_asks_is_shown_and_answered(tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    recorder.add(ev.JobStarted(job=1, kind="run", title="run"))
    recorder.add(ev.Asked(what="Flush the cache of that server?", why="2 requests run on it."))
    async with scripted_runner(path) as told, workbench(path, readonly=False) as (app, pilot):
        assert "Flush the cache of that server?" in screen_text(app)
        assert "2 requests run on it." in screen_text(app)
        await press(pilot, "y")
        assert told == [cmd.Confirm()]


@pytest.mark.parametrize(("key", "last"), [("l", cmd.Detach()), ("s", cmd.Stop())])
async def test_quitting_asks_whether_the_server_stops(key, last, measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (app, pilot):
        text = await press(pilot, "q")
        assert "stop the server" in text
        assert "leave it running" in text
        await press(pilot, "c")
        assert told == []
        await pilot.press("q")
        await pilot.press(key)
        await settle(pilot)
        assert told == [last]
        assert app.return_code == 0


async def test_quitting_a_finished_session_asks_nothing(finished):
    async with workbench(finished) as (app, pilot):
        await pilot.press("q")
        assert app.return_code == 0


async def test_control_c_says_how_to_quit(finished):
    async with workbench(finished) as (_app, pilot):
        assert "press q to quit" in await press(pilot, "ctrl+c")


PLACES = {
    "main": [],
    "tokens": ["enter"],
    "origin": ["O"],
    "verdict": ["v"],
    "log": ["l"],
    "commands": ["at"],
}


@pytest.mark.parametrize("place", PLACES)
async def test_every_action_of_every_screen_can_be_pressed(place, finished):
    async with scripted_runner(finished):
        for action in of_screen(place):
            async with workbench(finished, readonly=False) as (app, pilot):
                await press(pilot, *PLACES[place])
                assert app.screen.place == place
                await press(pilot, action.keys[0])
                assert app._exception is None, action.id


async def test_every_action_of_lists_and_logs_can_be_pressed(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, *(a.keys[0] for a in of_screen("table") if a.id != "choose"), "enter", "escape")
        await press(pilot, "l", *(a.keys[0] for a in of_screen("lines")))
        assert app._exception is None
        assert len(ACTIONS) > 30


async def test_the_palette_offers_the_actions_with_the_reason_why_not(finished):
    async with workbench(finished, size=(120, 40)) as (_app, pilot):
        text = await press(pilot, "ctrl+p", *"cancel")
        assert "not now: nothing is running" in text


async def test_both_themes_draw(finished):
    async with workbench(finished) as (app, pilot):
        before = screen_text(app)
        assert await press(pilot, "T") == before
        assert app.theme == "klbench-light"


async def until(pilot, condition, deadline_s=10.0) -> None:
    """Return once the condition holds."""
    import asyncio

    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - the follower polls a file
            await asyncio.sleep(0.02)
    await settle(pilot)
