"""What is held back while the workbench's updates are paused: the run goes on, the screens stand still.

    PAUSED at 19:27:44, F continues · held back: 12 events, 214 log lines · the run ended: done

Invariant: nothing is lost and nothing is drawn twice. The newest state holds all that the events said, the
log's lines are kept in their order, as many of them as the workbench keeps at all.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from klbench.session.state import SessionState

if TYPE_CHECKING:
    from klbench.tui.messages import SessionChanged


@dataclass(slots=True)
class Held:
    """The session as it was shown when the pause began, and what came since."""

    at: float
    shown: SessionState
    was_live: bool
    most_lines: int
    latest: SessionChanged | None = None
    logs: deque[tuple[list[str], bool]] = field(default_factory=deque)
    """New lines of the log, and whether it began anew before them."""
    came: int = 0
    """How many lines of the log came, kept or not."""
    _kept: int = 0

    def take(self, message: SessionChanged) -> None:
        """Hold a change back."""
        self.latest = message
        if not (message.log_lines or message.log_restarted):
            return
        self.logs.append((message.log_lines, message.log_restarted))
        self.came += len(message.log_lines)
        self._kept += len(message.log_lines)
        while self._kept - len(self.logs[0][0]) >= self.most_lines:
            self._kept -= len(self.logs.popleft()[0])

    def words(self, key: str) -> str:
        """What the screen says of it; `key` ends the pause."""
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        state = self.latest.state if self.latest is not None else self.shown
        events, lines = max(state.seq - self.shown.seq, 0), self.came
        counts = [f"{count:,} {name}{'s' if count != 1 else ''}" for count, name in
                  ((events, "event"), (lines, "log line")) if count]  # fmt: skip
        held = f"held back: {', '.join(counts)}" if counts else "nothing has come since"
        return " · ".join([f"PAUSED at {at}, {key} continues", held, *self._news(state)])

    def _news(self, state: SessionState) -> list[str]:
        """What somebody who waits would want to know at once."""
        news = []
        if state.question is not None and state.question != self.shown.question:
            news.append("the runner asks something")
        if self.was_live and self.latest is not None and not self.latest.live:
            news.append("the runner has ended")
        if state.troubles[-1:] != self.shown.troubles[-1:] and state.troubles[-1].level == "error":
            news.append("an error")
        if (ended := state.last_job) is not None and ended != self.shown.last_job:
            news.append(f"the {ended.kind} ended: {ended.outcome}")
        return news
