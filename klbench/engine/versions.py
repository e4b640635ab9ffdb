"""Which versions of sglang klbench was used with, and what to say about another one."""

from __future__ import annotations

import re

OLDEST = "0.5.17"
NEWEST = "0.5.23"
"""The newest that klbench was run with; later ones are asked what they take, like all others."""


def number_of(version: str) -> tuple[int, ...] | None:
    """The release as numbers, "0.5.17.post1" -> (0, 5, 17); None where the text begins with none."""
    found = re.match(r"\d+(?:\.\d+){0,2}", version)
    return tuple(map(int, found.group().split("."))) if found else None


def doubt_about(version: str | None) -> str | None:
    """What a user should know about a server of this version, None for one that klbench was used with."""
    number = number_of(version) if version else None
    if number is None:
        return f"the server does not say a version that klbench understands ({version or 'none'})"
    if number < (number_of(OLDEST) or ()):
        return f"sglang {version} is older than {OLDEST}, the oldest that klbench knows: capture may not work"
    if number > (number_of(NEWEST) or ()):
        return f"sglang {version} is newer than {NEWEST}, the newest that klbench was used with"
    return None
