"""Windows smaller than what klbench needs: they say so and nothing else, and all comes back with the room."""

import pytest
from pilots import press, screen_text, settle, workbench


@pytest.mark.parametrize("size", [(59, 15), (80, 15), (59, 24), (20, 5), (6, 6), (1, 1)])
@pytest.mark.parametrize("key", [None, "w", "D", "t", "v", "l"])
async def test_a_window_of_any_size_says_at_most_that_it_is_too_small(finished, size, key):
    async with workbench(finished) as (app, pilot):
        before = await press(pilot, key) if key else screen_text(app)
        await pilot.resize_terminal(*size)
        await settle(pilot)
        letters = "".join(screen_text(app).split())
        assert "klbenchneeds".startswith(letters[:12]), screen_text(app)
        await pilot.resize_terminal(80, 24)
        await press(pilot, "ctrl+l")  # any key takes away what the one before said
        assert before.splitlines()[:3] == screen_text(app).splitlines()[:3]
