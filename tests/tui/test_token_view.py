"""An empty tokens' pane says why it is empty: nothing measured, under way, stopped, or left out and why."""

from dataclasses import replace

import numpy as np
import pytest
import recorded
from pilots import screen_text, scripted_runner, settle, workbench

from klbench.tui.measurement import measure
from klbench.tui.widgets.token_view import why_left_out

WIDE = (160, 45)


def pane(text: str) -> str:
    """What stands in the tokens' pane of a wide main screen, in one line."""
    lines = text.splitlines()
    top = next(place for place, line in enumerate(lines) if "[3] tokens" in line)
    left = lines[top].index("[3] tokens") - 2
    return " ".join(" ".join(line[left:].strip("│ ") for line in lines[top + 1 : top + 26]).split())


async def test_before_a_run_nothing_is_measured_yet(tmp_path):
    recorder = recorded.start(tmp_path / "20251129-dense")
    recorded.launch(recorder)
    async with workbench(recorder.folder, size=WIDE) as (app, _pilot):
        assert "Nothing is measured yet." in pane(screen_text(app))
        assert "left" not in pane(screen_text(app))


async def test_what_a_runner_that_died_was_doing_is_not_under_way(measuring):
    async with workbench(measuring, size=WIDE) as (app, pilot):
        app.model.chosen_helper = "prefill_cache_hit"
        app.screen.show_model()
        await settle(pilot)
        text = screen_text(app)
        assert "prefill_cache_hit is not done yet" not in pane(text)
        assert "under way" not in pane(text)
        assert "The run did not end" in text
        assert "press u" in text


async def test_while_a_helper_works_it_is_under_way(measuring):
    async with scripted_runner(measuring), workbench(measuring, size=WIDE, readonly=False) as (app, pilot):
        app.model.chosen_helper = "prefill_cache_hit"
        app.screen.show_model()
        await settle(pilot)
        said = "prefill_cache_hit is under way: its tokens appear here when its arms have ended."
        assert said in pane(screen_text(app))
        app.model.chosen_helper = "decode_cache_hit"
        app.screen.show_model()
        await settle(pilot)
        assert "decode_cache_hit is not begun: its tokens" in pane(screen_text(app))


@pytest.mark.parametrize(
    ("helper", "cached", "why"),
    [
        ("prefill_cache_hit", 0, "nothing of its prompt was cached"),
        ("decode_cache_hit", 41, "its 41 cached tokens do not reach into what decode wrote"),
    ],
)
def test_a_request_that_was_left_out_says_why(helper, cached, why):
    whole = recorded.columns(helper, dirty=False)
    dropped, hits = whole.dropped.copy(), whole.cached_generation.copy()
    dropped[3], hits[3] = True, cached
    new = recorded.NEW_TOKENS
    kept = np.delete(np.arange(len(whole.token_id)), slice(3 * new, 4 * new))
    start = whole.start.copy()
    start[4:] -= new
    columns = replace(
        whole,
        dropped=dropped,
        cached_generation=hits,
        start=start,
        token_id=whole.token_id[kept],
        decode_nats=whole.decode_nats[kept],
        prefill_nats=whole.prefill_nats[kept],
    )
    said = why_left_out(measure(1, columns), 3)
    assert said == f"No tokens were compared: {helper} left request 3 out,\nfor {why}."
