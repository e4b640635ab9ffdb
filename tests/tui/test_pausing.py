"""Pausing the updates: the screens stand still, say what is held back, and lose nothing."""

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, until, workbench

from klbench.session import events as ev
from klbench.session.log import Entry
from klbench.session.state import SessionState
from klbench.tui.messages import SessionChanged
from klbench.tui.pausing import Held
from klbench.tui.widgets.virtual_table import VirtualTable


def go_on(session) -> None:
    """The second helper ends, the server says five lines, the job ends."""
    lines = (session / "events.jsonl").read_bytes().count(b"\n")
    recorder = recorded.Recorder(session, at=recorded.BEGAN_AT + 900, seq=lines)
    recorded.run_helper(recorder, 1, "prefill_cache_hit", dirty=True)
    recorded.end_run(recorder)
    with open(session / "server" / "server.log", "a", encoding="utf-8") as log:
        log.write("".join(f"[2025-11-29 19:40:0{i}] Decode batch {i}\n" for i in range(5)))


async def held(app, pilot, events: int, lines: int) -> None:
    """Wait until that much is held back."""
    await until(pilot, lambda: app.model.held.latest is not None and app.model.held.came >= lines
                and app.model.held.latest.state.seq - app.model.held.shown.seq >= events)  # fmt: skip


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
async def test_the_screen_stands_still_and_says_what_is_held_back(measuring, size):
    async with scripted_runner(measuring), workbench(measuring, size=size, readonly=False) as (app, pilot):
        table = app.screen.query_one("#requests-table", VirtualTable)
        await press(pilot, "1", "down", "up", "2", "down", "down")  # a helper and a request of it
        chosen, before = table.row, screen_text(app)
        paused = await press(pilot, "F")
        assert "PAUSED at " in paused
        assert "nothing has come since" in paused
        go_on(measuring)
        await held(app, pilot, 8, 5)
        text = screen_text(app)
        assert "F continues · held back: 8 events, 5 log lines" in text
        assert "Decode batch" not in text
        still = [line for line in text.splitlines() if "PAUSED" not in line]
        stood = [line for line in paused.splitlines() if "PAUSED" not in line]
        assert still == stood
        assert "the run ended: done" in text or size == (80, 24)
        text = await press(pilot, "F")
        assert "PAUSED" not in text
        assert "DIVERGED" in text
        assert text != before
        assert app.model.state.seq == (measuring / "events.jsonl").read_bytes().count(b"\n")
        assert app.model.log_lines[-1].endswith("Decode batch 4")
        assert app.model.log_lines.count(app.model.log_lines[-1]) == 1
        assert table.row == chosen


async def test_every_screen_says_that_it_stands_still(finished):
    async with scripted_runner(finished), workbench(finished, readonly=False) as (_app, pilot):
        for keys in (["F"], ["enter"], ["escape", "l"], ["escape", "v"], ["escape", "O"]):
            assert "PAUSED at" in await press(pilot, *keys), keys
        assert "PAUSED" not in await press(pilot, "F")


async def test_what_is_sent_to_the_runner_ends_the_pause(finished):
    async with scripted_runner(finished) as told, workbench(finished, readonly=False) as (app, pilot):
        await press(pilot, "F")
        assert app.model.held is not None
        assert "PAUSED" not in await press(pilot, "e")
        await until(pilot, lambda: told)


async def test_a_session_that_nobody_works_on_has_nothing_to_hold_back(finished):
    async with workbench(finished) as (app, pilot):
        assert "nothing goes on here" in await press(pilot, "F")
        assert app.model.held is None


async def test_a_refusal_says_that_it_may_be_out_of_date(measuring):
    async with scripted_runner(measuring), workbench(measuring, readonly=False) as (_app, pilot):
        text = await press(pilot, "F", "r")
        assert "a run is running" in text
        assert "as it was when updates were paused" in " ".join(text.split())


def test_the_log_is_held_in_the_bound_that_it_is_kept_in():
    nothing = SessionState()
    waiting = Held(0.0, nothing, True, most_lines=100)
    for number in range(1000):
        waiting.take(SessionChanged(nothing, True, [f"line {number}"] * 10, number == 995))
    kept = [line for lines, _ in waiting.logs for line in lines]
    assert len(kept) == 100
    assert kept[-1] == "line 999"
    assert [restarted for _, restarted in waiting.logs].count(True) == 1
    assert "10,000 log lines" in waiting.words("F")


def test_what_somebody_waits_for_is_said():
    shown = SessionState()
    waiting = Held(0.0, shown, True, most_lines=100)
    trouble = ev.Trouble(level="error", what="out of memory", why="", next="")
    waiting.take(SessionChanged(shown.apply(Entry(1, 2.0, trouble)), False, [], False))
    words = waiting.words("F")
    assert "1 event " in words
    assert "the runner has ended" in words
    assert "an error" in words
