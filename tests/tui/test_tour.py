"""The tour: it offers itself once, says at every stop what is to be seen, and ends at the operator."""

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, workbench
from ways import SIZES, at

from klbench import settings
from klbench.session.reading import read_state
from klbench.tui.messages import SessionsListed
from klbench.tui.model import Model
from klbench.tui.tour import STEPS, stop_of, tour_lines, tour_request


def test_what_the_tour_starts_can_be_repeated_on_the_command_line():
    line = tour_request().command_line()
    assert "--fault restore-key" in line
    assert line.endswith("--demo dense")


async def test_it_is_offered_once_and_starts_with_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("KLBENCH_CONFIG", str(tmp_path / "none.toml"))
    started = []

    async def begin(self, start):  # noqa: ARG001
        started.append(start)

    monkeypatch.setattr("klbench.tui.connection.Connection.begin", begin)
    for first in (True, False):
        async with workbench(None, settings=settings.load()) as (app, pilot):
            await app.workers.wait_for_complete()
            app.post_message(SessionsListed([]))
            await settle(pilot)
            assert ("First time here?" in screen_text(app)) == first
            if first:
                text = await press(pilot, "t")
                assert started == [tour_request()]
                assert "TOUR 1/6" in text


@pytest.mark.parametrize("size", SIZES, ids=at)
async def test_it_says_what_is_to_be_seen_on_the_way_to_the_operator(size, finished, snapshot):
    async with scripted_runner(finished), workbench(finished, size=size, readonly=False) as (app, pilot):
        app.model.touring = True
        app.show_all()
        await settle(pilot)
        assert "TOUR 3/6" in screen_text(app)
        snapshot(f"tour-main-{at(size)}", screen_text(app))
        assert "TOUR 4/6" in await press(pilot, "enter")
        text = await press(pilot, "o")
        assert "TOUR 6/6" in text
        assert "model.layers.1.self_attn.attn" in text
        snapshot(f"tour-origin-{at(size)}", text)
        assert "the tour stands in the guide's place" in " ".join((await press(pilot, "w")).split())
        text = await press(pilot, "ctrl+t")
        assert "TOUR" not in text
        assert "the tour is over" in text


def test_every_stop_is_met_and_no_line_is_wider_than_the_window(finished, tmp_path):
    seen = set()
    measuring = recorded.measuring(tmp_path / "measuring")
    for path, places in ((finished, ("main", "tokens", "log")), (measuring, ("main", "origin"))):
        model = Model(state=read_state(recorded.folder_of(path)))
        for place in places:
            seen.add(stop_of(place, model)[0])
            for width in (60, 80, 160):
                assert all(len(line) < width for line in tour_lines(place, model, width))
    assert {0, 3, 4, 5} <= seen
    assert max(seen) < STEPS


async def test_it_stands_at_the_launch_until_the_run_begins(tmp_path):
    path = tmp_path / "20251129-dense"
    recorder = recorded.start(path)
    recorded.launch(recorder)
    async with scripted_runner(path), workbench(path, readonly=False) as (app, pilot):
        app.model.touring = True
        app.show_all()
        await settle(pilot)
        assert "TOUR 1/6" in screen_text(app)
