"""Every screen at three sizes as text, and what its keys do.

The snapshots are plain files: a changed screen shows in a diff as what a user would see.
"""

import numpy as np
import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, until, workbench
from ways import SIZES, at, at_work, go

from klbench import settings
from klbench.core.text import cell_width
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.folder import SessionFolder
from klbench.session.survey import SessionSummary
from klbench.settings import remembered
from klbench.tui.messages import MachineKnown, SessionsListed
from klbench.tui.screens.dialogs import (
    cancel_choice,
    control_choice,
    open_choice,
    quit_choice,
    relaunch_choice,
    repeat_choice,
    tour_choice,
)

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
    "all_tokens": ["t"],
    "compare": ["c"],
}


@pytest.mark.parametrize("size", SIZES, ids=at)
@pytest.mark.parametrize("name", WAYS)
async def test_screen_of_a_finished_session(name, size, finished, snapshot):
    async with workbench(finished, size=size) as (_app, pilot):
        snapshot(f"{name}-{at(size)}", await press(pilot, *WAYS[name]))


@pytest.mark.parametrize("name", ["main", "tokens", "origin", "all_tokens"])
async def test_the_smallest_window_shows_rows_and_keys_in_its_whole_width(name, finished, snapshot):
    async with workbench(finished, size=(60, 16)) as (_app, pilot):
        shown = await press(pilot, *WAYS[name])
        assert "▌" in shown
        assert shown.splitlines()[-1].endswith("? help  q quit")
        assert max(map(cell_width, shown.splitlines())) == 60
        snapshot(f"{name}-60x16", shown)


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
            if name and size < (250, 70):  # a window of that size shows all four side by side
                snapshot(f"start-{name}-{at(size)}", text)
        assert "match clean · prefill_cache_hit diverged" in text  # what the column may have no room for
        assert "$ klbench open 20251129-dense" in text


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


@pytest.mark.parametrize("size", SIZES, ids=at)
async def test_the_numbers_of_an_origin_and_the_cells_of_a_row(size, tmp_path, snapshot):
    async with at_work(tmp_path, size) as (app, pilot, _told):
        for name in ("NumbersScreen", "CellsScreen"):
            await go(app, pilot, name)
            snapshot(f"{name.removesuffix('Screen').lower()}-{at(size)}", screen_text(app))


DIALOGS = {
    "quit": lambda: quit_choice(ours=True, job="experiment", launch_s=7260.0),
    "quit attached": lambda: quit_choice(ours=False, job="experiment", launch_s=None),
    "cancel": lambda: cancel_choice("run match, prefill_cache_hit, decode_cache_hit"),
    "tour": lambda: tour_choice(),
    "control": lambda: control_choice("pid 4194304 on pts/117 since 2025-11-29 19:27:34"),
    "repeat": lambda: repeat_choice(7260.0),
    "relaunch": lambda: relaunch_choice(None),
    "relaunch known": lambda: relaunch_choice(7260.0),
    "open": lambda: open_choice(
        (
            ("body", "the body of this call"),
            ("log", "the server's log"),
            ("commands", "the command log"),
            ("report", "the newest report"),
        ),
        "a-pager-with-a-long-name",
        "emacsclient",
    ),
}


@pytest.mark.parametrize("name", DIALOGS)
async def test_every_dialog_shows_all_its_answers_in_the_smallest_window(name, finished):
    dialog = DIALOGS[name]()
    async with workbench(finished, size=(60, 16)) as (app, pilot):
        app.push_screen(dialog)
        await settle(pilot)
        shown = [" ".join(line.strip(" │▌").split()) for line in screen_text(app).splitlines()]
        assert all(f"{key} {what}" in shown for _, key, what in dialog._answers), screen_text(app)


async def test_a_window_too_small_says_so_and_comes_back(finished):
    async with workbench(finished, size=(50, 14)) as (app, pilot):
        assert "at least 60 × 16" in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert "[1] helpers" in screen_text(app)


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
        assert "[2] requests · decode_cache_hit" in screen_text(app)
        await press(pilot, "up", "up")
        text = await press(pilot, "enter")
        assert "[2] requests · match" in text
        assert "0 of 32 diverged" in text


async def test_next_and_previous_difference_go_around(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "enter")
        view = app.screen.query_one("TokenView")
        differing = view._differing.tolist()
        assert view.table.row == differing[0]
        await press(pilot, "n", "n")
        assert view.table.row == differing[2]
        assert f"row {differing[2] + 1} of 128 · difference 3 of {len(differing)}" in screen_text(app)
        await press(pilot, "N", "N", "N")
        assert view.table.row == differing[-1]
        assert "last again" in screen_text(app)


async def test_escape_goes_one_level_back_and_loses_nothing(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "down", "down", "enter", "v", "l")
        chosen = app.model.request
        await press(pilot, "escape", "escape", "escape")
        assert "[2] requests" in screen_text(app)
        assert app.model.request == chosen != FIRST


async def test_the_log_follows_until_the_user_moves(finished):
    async with workbench(finished) as (app, pilot):
        assert "following" in await press(pilot, "l")
        shown = await press(pilot, "k")
        assert "not following" in shown
        assert "line 46 of 47 · 1 below, f follows" in shown
        text = await press(pilot, "exclamation_mark")
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
    recorder.add(ev.Asked(what="Flush the cache of that server?", why="[2] requests run on it."))
    async with scripted_runner(path) as told, workbench(path, readonly=False) as (app, pilot):
        assert "Flush the cache of that server?" in screen_text(app)
        assert "[2] requests run on it." in screen_text(app)
        await press(pilot, "a")
        assert told == [cmd.Confirm()]


@pytest.mark.parametrize("width", [80, 250])
async def test_what_a_capture_will_write_is_shown_while_it_runs_and_asked_where_it_is_much(tmp_path, width):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    recorded.run_helper(recorder, 1, "prefill_cache_hit", dirty=True)
    recorded.end_run(recorder)
    runner = scripted_runner(path)
    async with runner as told, workbench(path, readonly=False, size=(width, 40)) as (app, pilot):
        await press(pilot, "o")
        recorder.add(ev.JobStarted(job=2, kind="locate", title="locate the origin"))
        what, why = "the capture writes about 20.1 GB in 34 forwards", "60.0 GB are free in /traces"
        recorder.add(ev.Trouble(level="note", what=what, why=why))
        await until(pilot, lambda: "the capture writes about 20.1 GB in 34 forwards" in screen_text(app))
        assert "60.0 GB are free in /traces" in screen_text(app)
        recorder.add(ev.Asked(what="capture about 20.1 GB in 34 forwards", why=f"{why}; choose another"))
        await until(pilot, lambda: "The runner asks to capture about 20.1 GB" in screen_text(app))
        assert "a agrees, x cancels." in screen_text(app)
        await press(pilot, "a")
        assert told[-1] == cmd.Confirm()


@pytest.mark.parametrize(("key", "last"), [("l", cmd.Detach()), ("s", cmd.Stop())])
async def test_quitting_asks_whether_the_server_stops(key, last, measuring):
    async with scripted_runner(measuring) as told, workbench(measuring, readonly=False) as (app, pilot):
        text = await press(pilot, "q")
        assert "stop the server" in text
        assert "leave it running" in text
        await press(pilot, "c")
        assert told == []
        await press(pilot, "q")
        await pilot.press(key)
        await settle(pilot)
        assert told == [last]
        assert app.return_code == 0


async def test_quitting_a_finished_session_asks_nothing(finished):
    async with workbench(finished) as (app, pilot):
        await pilot.press("q")
        await settle(pilot)
        assert app.return_code == 0


async def test_control_c_says_how_to_quit_and_leaves_when_pressed_twice(finished):
    async with workbench(finished) as (app, pilot):
        assert "press q to quit" in await press(pilot, "ctrl+c")
        await press(pilot, "left", "ctrl+c")
        assert app.return_code is None
        await pilot.press("ctrl+c")
        await settle(pilot)
        assert app.return_code == 0


async def test_control_c_in_a_field_copies_what_is_selected_and_leaves_otherwise(finished):
    async with workbench(finished) as (app, pilot):
        await press(pilot, "slash", "k", "l", "shift+home", "ctrl+c")
        assert app.clipboard == "kl"
        assert not app.leaving
        await press(pilot, "end", "ctrl+c")
        assert app.leaving
        await pilot.press("ctrl+c")
        await settle(pilot)
        assert app.return_code == 0


async def test_what_is_selected_goes_the_way_of_every_copy(finished, monkeypatch):
    monkeypatch.delenv("TMUX", raising=False)
    async with workbench(finished) as (app, pilot):
        app.copy_to_clipboard("selected with the mouse")
        await settle(pilot)
        assert "copied to the terminal's clipboard" in " ".join(screen_text(app).split())
        assert (finished / "clipboard.txt").read_text() == "selected with the mouse"
        assert app.clipboard == "selected with the mouse"


async def test_control_c_twice_leaves_from_the_help_over_the_start_screen():
    async with workbench(None) as (app, pilot):
        await press(pilot, "question_mark", "ctrl+c")
        assert app.return_code is None
        await pilot.press("ctrl+c")
        await settle(pilot)
        assert app.return_code == 0


async def test_the_palette_offers_the_actions_with_the_reason_why_not(finished):
    async with workbench(finished, size=(120, 40)) as (_app, pilot):
        text = await press(pilot, "ctrl+p", *"cancel")
        assert "not now: nothing is running" in text


async def test_both_themes_draw(finished):
    async with workbench(finished) as (app, pilot):
        before = screen_text(app)
        assert "the light theme, also from now on" in await press(pilot, "T")
        assert app.theme == "klbench-light"
        assert remembered()["theme"] == "light"
        assert await press(pilot, "left") == before


async def test_the_filter_line_counts_keeps_and_gives_up(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        table = app.screen.query_one("#requests-table")
        assert "32 of 32" in await press(pilot, "slash", *"prompt>0")
        text = await press(pilot, "x")
        assert "'0x' is no number" in text
        assert len(table.order) == 32
        text = await press(pilot, "backspace", "enter")
        assert table.has_focus
        await press(pilot, "slash", *" differ>0", "enter")
        assert table.describe_filter() == "5 of 32 · prompt>0 differ>0"
        assert app.model.request == FIRST
        text = await press(pilot, "escape")
        assert "5 of 32 · prompt>0 differ>0" in text
        text = await press(pilot, "slash", "escape")
        assert len(table.order) == 32
        assert "prompt>0" not in text


async def test_all_tokens_are_filtered_by_helper_position_and_text_and_open_their_request(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        await press(pilot, "t", "slash")
        text = await press(pilot, *'helper:prefill tok:"[/INST]" offset:3..5 d>0', "enter")
        table = app.screen.query_one("#all-tokens-table")
        measured = app.model.measurements[1, "prefill_cache_hit"]
        c = measured.columns
        offset = np.arange(len(c.token_id)) % recorded.NEW_TOKENS
        inst = next(token for token, text in recorded.HOSTILE.items() if text == "[/INST]")
        wanted = (c.token_id == inst) & (offset >= 3) & (offset <= 5) & measured.differs
        assert 0 < len(table.order) == np.count_nonzero(wanted)
        assert f"{np.count_nonzero(wanted)} of 12,288" in text
        await press(pilot, "enter")
        at = int(np.flatnonzero(wanted)[0])
        assert app.screen.place == "tokens"
        assert app.model.request == at // recorded.NEW_TOKENS
        assert app.screen.query_one("TokenView").table.row == at % recorded.NEW_TOKENS


async def test_the_log_is_searched_by_text_and_by_regular_expression(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        text = await press(pilot, "l", "slash", *"avail mem")
        assert "1 of 47 lines" in text
        text = await press(pilot, "enter")
        assert "»[2025-11-29 19:27:31] Load weight begin." in text
        text = await press(pilot, "slash", *["backspace"] * 9, *"re:token: 20[1-")
        assert "no regular expression yet" in text
        text = await press(pilot, *"3]", "enter")
        assert app.screen.query_one("LogView").here is not None
        first = app.screen.query_one("LogView").here
        await press(pilot, "n")
        assert app.screen.query_one("LogView").here == first + 1
        await press(pilot, "N")
        assert app.screen.query_one("LogView").here == first


async def test_a_message_stays_until_the_next_key_and_covers_nothing(finished):
    async with workbench(finished) as (app, pilot):
        before = screen_text(app)
        said = await press(pilot, "x")
        assert "! nothing is running" in said
        assert said.splitlines()[0] == before.splitlines()[0]
        assert [line for line in said.splitlines() if line.startswith(" ▸")] == [
            line for line in before.splitlines() if line.startswith(" ▸")
        ]
        assert await press(pilot, "left") == before


async def test_the_forms_begin_with_what_was_set_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text(
        "[run]\nserver_python = '/opt/py'\nsamples = 7\nlaunch_timeout = 60\nnotify = true\n"
    )
    settings.remember("toured", True)
    async with workbench(None, settings=settings.load()) as (app, pilot):
        await press(pilot, "2", *"m")
        start = app.screen.launch()
        assert start.target.model_path == "m"
        options = start.options
        assert (options.server_python, options.samples, options.launch_timeout_s) == ("/opt/py", 7, 60)
        assert app.screen.demo().options.notify
        assert "--samples 7" in app.screen.demo().command_line()


async def test_a_picture_of_the_screen_is_written_beside_the_session(finished):
    async with workbench(finished) as (_app, pilot):
        text = await press(pilot, "f12")
        (picture,) = (finished / "pictures").iterdir()
        assert picture.name in "".join(text.split())
        assert "prefill_cache_hit" in picture.read_text(encoding="utf-8")
        assert picture.stat().st_mode & 0o077 == 0
