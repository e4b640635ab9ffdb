"""The manual: what an engineer looks up, as Markdown, for `klbench help TOPIC` and the workbench's help.

    topic = find("grades")                 # the topic "conditions"
    markdown(topic)                        # "# Condition 1, condition 2, and grades\\n..."

What the code already says (keys, settings, exit codes, steps, words, experiments) is made from it
(generated.py); only the rest lies here as text. `{key locate}` in a text stands for the key of that action.
Standard library only: `klbench help` starts as fast as `--version`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from klbench.errors import UsageError
from klbench.manual import generated


@dataclass(frozen=True, slots=True)
class Topic:
    """`name` is also the name of its file; `words` are other things that people call it."""

    name: str
    words: tuple[str, ...] = ()
    generate: Callable[[], str] = str
    """What is made from the code, behind the text."""


TOPICS: tuple[Topic, ...] = (
    Topic("path", ("guide", "steps", "start"), generated.path),
    Topic("helpers", ("match", "prefill_cache_hit", "decode_cache_hit", "statuses", "threshold")),
    Topic("conditions", ("condition", "grades", "kinds", "origin", "batch-invariance", "verdict")),
    Topic("experiments", ("experiment", "toggles"), generated.experiments),
    Topic("filter", ("sort", "search")),
    Topic("capture", ("locate", "cost", "dumper", "digests", "trace")),
    Topic("sessions", ("session", "resume", "continue", "replay", "repeat", "compare", "bundle")),
    Topic("exit-codes", ("exit", "codes", "json", "ci"), generated.exit_codes),
    Topic("configuration", ("config", "environment", "variables", "settings"), generated.settings),
    Topic("ssh", ("terminals", "terminal", "tmux", "screen", "slow-link", "copy", "colours")),
    Topic("keys", ("bindings", "shortcuts"), generated.keys),
    Topic("words", ("terms", "glossary"), generated.words),
)
BY_NAME = {topic.name: topic for topic in TOPICS}


def find(name: str) -> Topic:
    """The topic of that name, or of a word for it. Raises UsageError with the nearest ones."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    names = {word.replace("_", "-"): topic for topic in TOPICS for word in (topic.name, *topic.words)}
    if (topic := names.get(wanted)) is not None:
        return topic
    near = difflib.get_close_matches(wanted, [*names], 3, 0.6)
    topics = list(dict.fromkeys(names[word].name for word in near))
    raise UsageError(
        f"there is no topic {name!r}" + (f"; did you mean {' or '.join(topics)}?" if topics else ""),
        why=f"there are: {', '.join(BY_NAME)}",
        next="klbench help TOPIC, klbench COMMAND --help",
    )


def about(search: str) -> tuple[Topic | None, list[Topic]]:
    """The topic that `search` names or begins to name, and the others whose text holds it."""
    wanted = search.strip().lower()
    if len(wanted) < 3:
        return None, []
    named = next((topic for topic in TOPICS if wanted in (topic.name, *topic.words)), None)
    named = named or next((topic for topic in TOPICS if topic.name.startswith(wanted)), None)
    return named, [topic for topic in TOPICS if topic is not named and wanted in markdown(topic).lower()]


def markdown(topic: Topic) -> str:
    """The topic's text, with the keys that its actions have."""
    from klbench.tui.actions import key_of

    more = topic.generate()
    whole = _text(topic.name) + (f"\n{more}\n" if more else "")
    return re.sub(r"\{key (\w+)\}", lambda found: key_of(found[1]), whole)


@lru_cache
def _text(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.md").read_text(encoding="utf-8")


def title(topic: Topic) -> str:
    """Its heading."""
    return markdown(topic).partition("\n")[0].removeprefix("# ")
