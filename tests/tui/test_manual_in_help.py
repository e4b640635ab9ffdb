"""The manual in the workbench's help: a topic appears when its name is typed."""

from pilots import press, screen_text, workbench

from klbench.tui.actions import Situation
from klbench.tui.screens.help import help_lines


async def test_a_topic_is_read_where_the_keys_are(finished):
    async with workbench(finished, size=(120, 40)) as (app, pilot):
        await press(pilot, "question_mark", *"grades")
        assert "MANUAL: Condition 1, condition 2, and grades" in screen_text(app)
        assert "PROBABLE" not in screen_text(app)
        await press(pilot, *["pagedown"] * 9)
        assert "not_aligned" in screen_text(app)


def test_help_names_the_topics_and_where_else_a_word_stands():
    whole = "\n".join(help_lines("main", Situation()))
    assert "type a topic to read it here: path · helpers" in whole
    found = " ".join(help_lines("main", Situation(), "escape-time"))
    assert "The manual speaks of it, too: type ssh" in found
    assert "MANUAL" not in "\n".join(help_lines("main", Situation(), "lo"))
