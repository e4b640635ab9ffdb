"""Writes the README's table of keys from the registry of actions: `uv run python -m tests.tools.keys`."""

from __future__ import annotations

from klbench.tui import actions
from tests.bench.measure import markdown
from tests.tools.readme import README, write_part

_NAMES = {"table": "every table", "lines": "the log's lines", "map": "the map of layers",
          "all_tokens": "all tokens",          "before_after": "before and after"}  # fmt: skip


def where(action: actions.Action) -> str:
    """The screens of an action in words."""
    if action.screens == actions.ALL:
        return "everywhere"
    if set(action.screens) == set(actions.WORK):
        return "everywhere but the start"
    if set(action.screens) == set(actions.SUBSCREENS):
        return "everywhere but start and main"
    return ", ".join(_NAMES.get(place, place.replace("_", " ")) for place in action.screens)


def key_table() -> list[str]:
    """The registry as a Markdown table, in its order."""
    rows = []
    for action in actions.ACTIONS:
        keys = " ".join(f"`{actions.shown(key)}`" for key in action.keys)
        rows.append([keys, action.label, action.help.replace("|", "\\|"), where(action)])
    return ["", *markdown(["key", "action", "what it does", "where"], rows), ""]


def main() -> None:
    write_part("keys", key_table())
    print(f"{len(actions.ACTIONS)} keys in {README.name}")


if __name__ == "__main__":
    main()
