"""A verdict in one line, the same wherever it is read: table, report, list of sessions, screens.

verdict_in_words({"status": "found", "conditions": ["different_function"], "grade": "confirmed"})
"found: different function (condition 2) · confirmed"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONDITION_WORDS: Mapping[str, str] = {
    "batch_invariance": "batch invariance (condition 1)",
    "different_function": "different function (condition 2)",
    "race": "race",
}
"""By the codes of hypotheses.CONDITIONS; without its imports, for a list of sessions does without numpy."""

# Not a set: what a strange log calls a code may not be hashable.
NOT_EXERCISED = (
    "window_not_crossed",
    "chunk_within_request",
    "checkpoint_not_crossed",
    "no_restore",
    "page_not_filled",
    "no_batch",
    "no_graphs",
    "cold",
)
"""The codes of exercised.py that name something missed; the others say what was reached."""


def condition_words(code: str) -> str:
    """A condition with its number; a code of another version as it stands."""
    return CONDITION_WORDS.get(code, code.replace("_", " "))


def conditions_in_words(verdict: Mapping[str, Any]) -> str:
    """The conditions, joined by "or" where it is open which of them, else by "and"; "" for none."""
    named = verdict.get("conditions")
    known = [condition_words(str(code)) for code in named] if isinstance(named, list | tuple) else []
    return (" or " if verdict.get("grade") == "unknown" else " and ").join(known)


def verdict_in_words(verdict: Mapping[str, Any]) -> str:
    """Status, conditions and grade."""
    status, grade = str(verdict.get("status") or "undecided"), str(verdict.get("grade") or "unknown")
    conditions = conditions_in_words(verdict)
    return f"{status}: {conditions} · {grade}" if conditions else f"{status} · {grade}"
