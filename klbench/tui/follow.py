"""Follows a session: its event log, its runner's life, its server's log, as one message a quarter second.

Nothing is posted while nothing happens, so an idle workbench draws nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.message import Message

from klbench.errors import UsageError
from klbench.session.folder import SessionFolder
from klbench.session.log import LogTail
from klbench.session.reading import find_runner
from klbench.session.state import SessionState, without_runner
from klbench.tui.messages import SessionChanged
from klbench.tui.server_log import ServerLog, clean_line

STEP_S = 0.25
"""The screen changes at most four times a second, whatever the server does."""
LIFE_STEPS = 8
"""Every how many steps a silent runner is looked for: a killed one cannot say that it is gone."""


class SessionFollower:
    """Reads one session; `look` is one step."""

    def __init__(
        self, folder: SessionFolder, post: Callable[[Message], object], *, step_s: float = STEP_S
    ) -> None:
        self._step_s = step_s
        self._folder = folder
        self._post = post
        self._tail = LogTail(folder.events)
        self._folded = SessionState()
        self._live = False
        self._log: ServerLog | None = None
        self._log_name: str | None = None
        """As the event log has it; None before a server was started."""
        self._steps = 0

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(self._step_s)

    def look(self) -> None:
        """Post what changed since the last look, if anything did."""
        before = self._folded
        for entry in self._tail.drain():
            self._folded = self._folded.apply(entry)
        live = self._live
        if self._folded is not before or self._steps % LIFE_STEPS == 0:
            live = find_runner(self._folder) is not None
        first, self._steps = self._steps == 0, self._steps + 1
        lines, restarted = self._read_log()
        if first or live != self._live or self._folded is not before or lines or restarted:
            self._live = live
            state = self._folded if live else without_runner(self._folded)
            self._post(SessionChanged(state, live, lines, restarted))

    def _read_log(self) -> tuple[list[str], bool]:
        name = self._folded.server.log
        if not name:
            return [], False
        fresh, replaced = name != self._log_name, self._log_name is not None
        if fresh:
            self._log_name, self._log = name, None
            try:
                self._log = ServerLog(self._folder.resolve(name))
            except UsageError as error:
                return [clean_line(f"[the server's log is not read: {error.what}]")], replaced
        if self._log is None:
            return [], False
        lines, restarted = self._log.read()
        return lines, restarted or (fresh and replaced)
