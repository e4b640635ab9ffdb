"""What may be done to a server that is not ours: its user's leave, checked where the requests are sent.

Whoever forgets to ask gets an error here, and the server notices nothing.
"""

from __future__ import annotations

from enum import IntEnum

from klbench.errors import UsageError


class Leave(IntEnum):
    """How much its user agreed to; each allows what stands before it."""

    ASK = 0
    """Questions that compute nothing."""
    COMPUTE = 1
    """Requests that are generated or scored beside those of others."""
    FLUSH = 2
    """Emptying the cache that others have filled."""

    def check(self, needed: Leave, what: str) -> None:
        """Raises UsageError where `what` was not agreed to."""
        if self < needed:
            raise UsageError(
                f"{what} was not agreed to",
                why="the server is not ours, and others may use it",
                next="agree when klbench asks, or with --yes-flush; a server of your own: --launch",
            )
