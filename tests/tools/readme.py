"""Writes a part of the README that a command measured, between its two marks.

    uv run klbench selftest --full --json selftest.json
    uv run python -m tests.tools.readme selftest selftest.json

Several files are taken together, as of one model each. The marks are `<!-- NAME -->` and `<!-- /NAME -->`;
what stands between them is replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klbench.core.accuracy_table import combined, markdown

README = Path(__file__).parents[2] / "README.md"

PARTS: dict[str, Callable[[Sequence[Mapping[str, Any]]], list[str]]] = {
    "selftest": lambda documents: markdown(combined(documents)),
}


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """`text` with the lines between the marks of `name`. Raises ValueError where the marks are not there."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed or begin in inside:
        raise ValueError(f"{begin} and {end} do not stand in the text, once and in this order")
    return "\n".join([before + begin, *lines, end + after])


def write_part(name: str, lines: Sequence[str]) -> None:
    """Puts the lines between the README's marks of `name`. Raises ValueError where they are not there."""
    README.write_text(replaced(README.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in PARTS:
        print(f"usage: python -m tests.tools.readme {'|'.join(PARTS)} FILE.json...", file=sys.stderr)
        return 2
    name, *files = arguments
    documents = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    write_part(name, PARTS[name](documents))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
