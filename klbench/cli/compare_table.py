"""A klbench.compare/1 document for a person.

helper             before    after  differ       compared  fixed  introduced  decode moved  prefill moved
match              diverged  clean  512 → 0         16384    512           0             0            512
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klbench.cli import table
from klbench.core.text import kl
from klbench.session import compare_words


def lines(document: Mapping[str, Any]) -> list[str]:
    """The comparison: helpers first, then the code change, then what else differs."""
    rows = [_row(name, part) for name, part in document["helpers"].items()]
    names = (
        "helper", "before", "after", "differ", "avg KL", "compared", "fixed", "introduced", "decode moved",
        "prefill moved",
    )  # fmt: skip
    shown = table.columns(names, rows)
    shown += compare_words.helper_lines(document)
    shown += ["", compare_words.verdict_line(document)]
    shown += compare_words.code_lines(document["code"])
    shown += compare_words.key_lines(document)
    shown += [f"before: {document['before']['session']}", f"after: {document['after']['session']}"]
    return shown


def _row(name: str, part: Mapping[str, Any]) -> list[object]:
    before, after, change = part["before"], part["after"], part["change"]
    row: list[object] = [
        name,
        before["status"],
        after["status"],
        f"{_text(before['divergent_tokens'])} → {_text(after['divergent_tokens'])}",
        f"{kl(before['avg_kl_div'])} → {kl(after['avg_kl_div'])}",
    ]
    if change is None:
        return [*row, "–", "–", "–", "–", "–"]
    counts = ("compared", "fixed", "introduced", "decode_changed", "prefill_changed")
    return [*row, *(change[count] for count in counts)]


def _text(value: object) -> str:
    return "–" if value is None else str(value)
