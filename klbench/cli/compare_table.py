"""A klbench.compare/1 document for a person.

helper             before    after  differ       compared  fixed  introduced  decode moved  prefill moved
match              diverged  clean  512 → 0         16384    512           0             0            512
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klbench.cli import table
from klbench.core.text import kl

_WORDS = {
    "same": "the same: no logprob has other bits",
    "better": "better: divergences went, none came",
    "worse": "worse: divergences came, none went",
    "mixed": "mixed: some divergences went, others came",
    "other": "logprobs moved, but no divergence came or went",
    "undecided": "undecided: not every helper could be compared",
}
_FILES_SHOWN = 20


def lines(document: Mapping[str, Any]) -> list[str]:
    """The comparison: helpers first, then the code change, then what else differs."""
    rows = [_row(name, part) for name, part in document["helpers"].items()]
    names = (
        "helper", "before", "after", "differ", "avg KL", "compared", "fixed", "introduced", "decode moved",
        "prefill moved",
    )  # fmt: skip
    shown = table.columns(names, rows)
    for name, part in document["helpers"].items():
        if part["reason"]:
            shown.append(f"{name}: {part['reason']}")
        change = part["change"]
        if change and change["other_prompts"]:
            shown.append(
                f"{name}: {change['other_prompts']} requests have other prompts and were not compared"
            )
        if change and change["not_compared"]:
            shown.append(f"{name}: {change['not_compared']} tokens stand in one of the two only")
    shown += ["", _WORDS[document["verdict"]]]
    shown += _code(document["code"])
    shown += [
        f"differs: {name}: {_text(one)} → {_text(two)}" for name, (one, two) in document["differing"].items()
    ]
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


def _code(code: Mapping[str, Any] | None) -> list[str]:
    if code is None:
        return []
    before, after = code["before"], code["after"]
    if before["commit"] == after["commit"]:
        shown = [f"code: {after['commit'][:12]} {after['subject']}"]
    else:
        shown = [f"code: {before['commit'][:12]} → {after['commit'][:12]} {after['subject']}"]
        shown += [f"  + {line}" for line in code["commits"] or []]
        shown += [f"  - {line}" for line in code["commits_removed"] or []]
    files = code["changed_files"]
    shown += [f"  changed: {name}" for name in files[:_FILES_SHOWN]]
    if len(files) > _FILES_SHOWN:
        shown.append(f"  and {len(files) - _FILES_SHOWN} more files")
    if not code["files_known"]:
        shown.append("  which files changed between the commits git could not say here")
    if not files and before["commit"] == after["commit"]:
        shown.append("  no file changed")
    return shown


def _text(value: object) -> str:
    return "–" if value is None else str(value)
