"""The next step is one: guide and main screen say the same, and only what works from this terminal."""

import re
from dataclasses import replace

import pytest
import recorded
from pilots import press, screen_text, scripted_runner, settle, workbench

from klbench.core.guide import GuideFacts, where_we_are
from klbench.session import events as ev
from klbench.tui import next_step
from klbench.tui.actions import Situation

LIVE = Situation(session=True, live=True, server="ready", measured=True, request=5, request_diverged=True)
ENDED = replace(LIVE, live=False, server="stopped", name="s1")


def run_and_end(folder, *, ended: bool):
    """Helpers that diverged, with nothing located; its runner stopped where `ended`."""
    recorder = recorded.start(folder)
    recorded.launch(recorder)
    recorded.begin_run(recorder)
    for helper in recorded.HELPERS:
        recorded.run_helper(recorder, 1, helper, dirty=helper != "match")
    recorded.end_run(recorder)
    if ended:
        recorder.add(ev.ServerEnded(expected=True, exit_code=0, why="stopped", last_lines=[]))
        recorder.add(ev.RunnerEnded(reason="the user stopped it"))
    return folder


def said(text: str) -> str:
    """The screen's words in one line."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_before_an_origin_is_known_guide_and_main_screen_name_one_next_step(size, tmp_path):
    session = run_and_end(tmp_path / "20251129-dense", ended=False)
    async with scripted_runner(session), workbench(session, size=size, readonly=False) as (app, pilot):
        await settle(pilot)
        step = f"locate the origin in request {app.model.request}, the one under the cursor · press o"
        assert said(screen_text(app)).count(step) == 2
        now = next_step.current(app.model.guide_states())
        assert (now.step.code, now.key) == ("condition_2", "o")
        assert f"{now.todo} · press o" == step
        assert step in said(await press(pilot, "W"))


async def test_without_a_runner_both_name_the_key_that_starts_the_server_or_the_command(tmp_path):
    session = run_and_end(tmp_path / "20251129-dense", ended=True)
    async with workbench(session, size=(120, 40), readonly=False) as (app, pilot):
        text = said(screen_text(app))
        assert text.count("U starts the server, then o") == 2
        assert "press o" not in text
        assert next_step.current(app.model.guide_states()).way == "U starts the server, then o"
        app.model.skipped |= {"condition_2", "locate", "confirm"}
        app.screen.show_model()
        await settle(pilot)
        text = said(screen_text(app))
        assert text.count("in a shell: klbench report 20251129-dense") == 2
        assert "press e" not in text


@pytest.mark.parametrize(
    ("key", "situation", "way"),
    [
        ("o", LIVE, "press o"),
        ("X", LIVE, "press X"),
        ("e", LIVE, "press e"),
        ("r", LIVE, "press r"),
        ("v", replace(ENDED, verdict=True), "press v"),
        ("o", replace(LIVE, request_diverged=False), "choose a request that differs, then press o"),
        ("o", replace(ENDED, located=True), "press o"),
        ("o", ENDED, "U starts the server, then o"),
        ("X", ENDED, "U starts the server, then X"),
        ("M", ENDED, "U starts the server, then M"),
        ("r", ENDED, "U starts the server, then r"),
        ("r", replace(ENDED, measured=False), "u starts the server and runs the helpers"),
        ("e", ENDED, "in a shell: klbench report s1"),
        ("X", replace(LIVE, server="stopped"), "U starts the server, then X"),
        ("X", replace(LIVE, watching=True, controlled=True), "C takes control, then X"),
        ("X", replace(ENDED, readable_only=True, readonly=True), "in a shell: klbench run --like s1"),
    ],
)
def test_the_way_is_what_the_registry_lets_happen(key, situation, way):
    assert next_step.way(key, situation) == way


def test_what_was_interrupted_is_continued_rather_than_run_anew():
    states = where_we_are(GuideFacts(server=recorded.FACTS))
    for situation, way in (
        (replace(ENDED, interrupted=True), "press u"),
        (replace(LIVE, interrupted=True), "press u, or run all again · press r"),
    ):
        found = next_step.reachable(states, situation)
        assert next_step.sentence(found) == f"continue the run where it was · {way}"


def test_a_server_that_failed_comes_first():
    states = next_step.reachable(where_we_are(GuideFacts()), replace(LIVE, server="failed"))
    assert next_step.sentence(states) == "look at the server's log: it says why it failed · press l"


def test_nothing_is_next_where_every_step_has_its_answer():
    states = where_we_are(GuideFacts(server=recorded.FACTS, verdict={"status": "none"}, reported=True))
    assert next_step.sentence(next_step.reachable(states, LIVE)) == ""
