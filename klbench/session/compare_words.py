"""What a klbench.compare/1 document says in words, for the command line and the workbench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klbench.core.text import counted

_VERDICTS = {
    "same": "the same: no logprob has other bits",
    "better": "better: divergences went, none came",
    "worse": "worse: divergences came, none went",
    "mixed": "mixed: some divergences went, others came",
    "other": "logprobs moved, but no divergence came or went",
    "undecided": "undecided: not every helper could be compared",
}
_FILES_SHOWN = 20


def helper_lines(document: Mapping[str, Any]) -> list[str]:
    """What of the helpers was not compared, and why."""
    lines = []
    for name, part in document["helpers"].items():
        if part["reason"]:
            lines.append(f"{name}: {part['reason']}")
        change = part["change"]
        if change and change["other_prompts"]:
            have = counted(change["other_prompts"], "request has", "requests have")
            lines.append(f"{name}: {have} other prompts and cannot be compared")
        if change and change["not_compared"]:
            stand = counted(change["not_compared"], "token stands", "tokens stand")
            lines.append(f"{name}: {stand} in one of the two only")
    return lines


def change_lines(document: Mapping[str, Any]) -> list[str]:
    """The verdict, what was not compared, the change of the code, and what else differs."""
    return [
        verdict_line(document),
        *helper_lines(document),
        *code_lines(document["code"]),
        *key_lines(document),
    ]


def verdict_line(document: Mapping[str, Any]) -> str:
    return _VERDICTS[document["verdict"]]


def key_lines(document: Mapping[str, Any]) -> list[str]:
    """Settings and code that are not the same in the two."""
    return [
        f"differs: {name}: {_text(one)} → {_text(two)}" for name, (one, two) in document["differing"].items()
    ]


def code_lines(code: Mapping[str, Any] | None) -> list[str]:
    """Commits and files between the two; nothing where one of them is no checkout."""
    if code is None:
        return []
    before, after = code["before"], code["after"]
    if before["commit"] == after["commit"]:
        lines = [f"code: {after['commit'][:12]} {after['subject']}"]
    else:
        lines = [f"code: {before['commit'][:12]} → {after['commit'][:12]} {after['subject']}"]
        lines += [f"  + {line}" for line in code["commits"] or []]
        lines += [f"  - {line}" for line in code["commits_removed"] or []]
    files = code["changed_files"]
    lines += [f"  changed: {name}" for name in files[:_FILES_SHOWN]]
    if len(files) > _FILES_SHOWN:
        lines.append(f"  and {counted(len(files) - _FILES_SHOWN, 'more file')}")
    if not code["files_known"]:
        lines.append("  which files changed between the commits git could not say here")
    if not files and before["commit"] == after["commit"]:
        lines.append("  no file changed")
    return lines


def _text(value: object) -> str:
    return "–" if value is None else str(value)
