"""The requests of others that ran beside a helper's own on a server.

Where the server carries our plugin its log of forwards tells exactly: each forward of ours is there with all
its requests, those of others without a name (insitu/composition.py).

Elsewhere there are only the server's own counts, running and queued, at a look every second or two. An arm is
one POST that is answered as a whole, so nothing tells how many of ours have ended before its end, and they
count as running until then. What the counts show beyond them was of others; what they cannot show is a
request of others that came and went between two looks, or that ran while as many of ours had ended already.
Nor does a count that rises tell: requests are in neither count while their prefill runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from klbench.engine.arms import Rids
from klbench.engine.client import Load
from klbench.engine.compositions import read_compositions
from klbench.errors import KlbenchError
from klbench.insitu.rids import parse_rid


class Others:
    """Watches for them while one helper runs; made before its first request."""

    def __init__(
        self, forwards: Path | None = None, nonce: str | None = None, rids: Rids | None = None
    ) -> None:
        self._counted = 0
        ours = parse_rid(rids("generation", 0), nonce) if rids is not None and nonce is not None else None
        self._pass = ours.number if ours is not None else None
        self._nonce = nonce or ""
        self._forwards = forwards
        self._begin_bytes = forwards.stat().st_size if forwards is not None and forwards.exists() else 0

    def hear(self, load: Load, ours: int) -> None:
        """Takes the server's counts while `ours` requests of the helper are not answered."""
        self._counted = max(self._counted, load.running + load.queued - ours)

    async def most(self) -> int:
        """The most requests of others that were seen at once, since this was made."""
        return max(self._counted, await asyncio.to_thread(self._most_in_a_forward))

    def _most_in_a_forward(self) -> int:
        """The most that shared one forward with ours; 0 too where there is no log that tells."""
        if self._forwards is None or self._pass is None or not self._forwards.exists():
            return 0
        try:
            made = read_compositions(self._forwards, self._nonce, [self._pass], begin_bytes=self._begin_bytes)
        except KlbenchError:
            return 0
        others = (
            sum(part.rid is None or part.rid.number != self._pass for part in forward.parts)
            for forward in made
        )
        return max(others, default=0)
