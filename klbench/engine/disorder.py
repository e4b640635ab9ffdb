"""What sglang's own checks say of its cache: warnings in its log, for by default it goes on.

    [..] WARNING: full token_to_kv_pool memory leak detected! available_size=..., evictable_size=...

Pages that are lost or shared are a lead to a wrong restore (condition 2), also where nothing diverged yet.
"""

from __future__ import annotations

import re
from pathlib import Path

from klbench.engine.progress import LogTail

PATTERN = r"pool memory leak|memory leak detected|shares a page"
_SAID = re.compile(PATTERN, re.IGNORECASE)


class CacheChecks:
    """Reads a server's log from its end on; without a log (an attached server) nothing is seen."""

    def __init__(self, log: Path | None) -> None:
        self._tail = LogTail(log, from_end=True) if log is not None else None

    def news(self) -> str | None:
        """The first new line that tells of disorder, as the log has it (untrusted text); None for none."""
        found: str | None = None
        while self._tail is not None and (lines := self._tail.lines()):
            found = found or next((line for line in lines if _SAID.search(line)), None)
        return found
