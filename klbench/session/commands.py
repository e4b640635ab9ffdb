"""The dozen small commands that a client may send to a runner through its Unix socket.

One JSON object a line, answered by one line: `{"ok": true}` or `{"ok": false, "error": {what, why, next}}`.
`ok` means accepted: what comes of it is read from the event log.
"""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=str.lower):
    """Base of all commands."""


class Ping(Command, frozen=True, kw_only=True):
    """Is a runner there?"""


class Control(Command, frozen=True, kw_only=True):
    """Take control of the runner: from then on it refuses the commands of every other connection."""

    client: str
    """A name of the connection's own, by which it knows its `ControlTaken` event."""
    terminal: str = ""
    over: bool = False
    """Take it from another terminal that has it."""


class Run(Command, frozen=True, kw_only=True):
    """Execute helpers (all three when empty) with the session's prompts."""

    helpers: list[str] = []


class Continue(Command, frozen=True, kw_only=True):
    """Take up the latest run where it was interrupted; nothing that it has is measured again."""


class Locate(Command, frozen=True, kw_only=True):
    """Locate the origin of a divergence; helper and request by the rule of `klbench locate` when None."""

    helper: str | None = None
    request: int | None = None
    relaunch: bool = False
    """Allow a relaunch with --ready-to-capture when the server cannot be captured as it runs."""


class Census(Command, frozen=True, kw_only=True):
    """Replay every stateless operator with 1, 2, 3, ... rows: which are batch-invariant."""

    relaunch: bool = False
    """Allow a relaunch with --ready-to-capture when the server's operators cannot be seen as it runs."""


class Replay(Command, frozen=True, kw_only=True):
    """Call a located operator again alone with 1, 2, 3, ... rows; of the latest locate when None."""

    locate: int | None = None
    finding: int = 0
    """Its place in the findings, from 0."""


class Experiment(Command, frozen=True, kw_only=True):
    """Make experiments on the latest run's divergence: of the first diverged helper when None."""

    names: list[str]
    helper: str | None = None
    max_relaunches: int | None = None
    """None asks where the relaunches take long."""


class Cancel(Command, frozen=True, kw_only=True):
    """Cancel the job in progress; what it has is kept."""


class Report(Command, frozen=True, kw_only=True):
    """Write the Markdown and the JSON report."""


class Relaunch(Command, frozen=True, kw_only=True):
    """Stop our server and start it again; `ready_to_capture` overrides the session's option."""

    ready_to_capture: bool = False


class Confirm(Command, frozen=True, kw_only=True):
    """Agree to what the runner asked (flushing the cache of an attached server)."""


class Stop(Command, frozen=True, kw_only=True):
    """Stop our server, end the runner."""


class Detach(Command, frozen=True, kw_only=True):
    """The workbench leaves; the runner goes on."""


COMMAND_TYPES: tuple[type[Command], ...] = (
    Ping,
    Control,
    Run,
    Continue,
    Locate,
    Census,
    Replay,
    Experiment,
    Cancel,
    Report,
    Relaunch,
    Confirm,
    Stop,
    Detach,
)
