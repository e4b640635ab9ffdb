"""Whose commands a runner takes: one terminal has control, the others watch.

Invariants: control goes with a connection, so a terminal that is lost gives it up without a word; who has it
is an event, so every terminal shows the same; a connection without control may command only where nobody has
it (a script's single command).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from klbench.errors import UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.control import Client
from klbench.session.snapshot import Controller


class Controlling:
    """Who has control. `emit` records a change; `shown` is the state's own record of it."""

    def __init__(self, emit: Callable[[ev.Event], object], shown: Callable[[], Controller | None]) -> None:
        self._emit = emit
        self._shown = shown
        self._client: Client | None = None
        self._name = ""

    def check(self, client: Client) -> None:
        """Raises UsageError where another connection has control."""
        if self._client is None or self._client is client:
            return
        raise UsageError(
            "another terminal controls this session",
            why=described(self._shown()),
            next="watch here, or take control over",
        )

    def take(self, client: Client, command: cmd.Control) -> None:
        """Gives the connection control. Raises UsageError where another has it and `over` is not said."""
        if not command.over:
            self.check(client)
        if self._client is client and self._name == command.client:
            return
        self._client, self._name = client, command.client
        self._emit(ev.ControlTaken(client=command.client, terminal=command.terminal[:64], pid=client.pid))

    def left(self, client: Client) -> None:
        """The connection detached or was lost."""
        if self._client is client:
            self._client = None
            self._emit(ev.ControlLeft(client=self._name))

    def close(self) -> None:
        """Nobody has control of a runner that ends, and nobody takes it any more."""
        self._client = None
        self._emit = lambda _event: None


def described(controller: Controller | None) -> str:
    """`pts/3 (pid 4211) has had it since 19:17`; untrusted text."""
    if controller is None:
        return ""
    since = time.strftime("%H:%M", time.localtime(controller.since))
    return f"{controller.terminal or 'it'} (pid {controller.pid}) has had it since {since}"
