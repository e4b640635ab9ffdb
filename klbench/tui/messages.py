"""What the parts of the workbench say to each other. Workers never touch widgets: they post these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.message import Message

from klbench.errors import KlbenchError
from klbench.session.commands import Command
from klbench.session.request import StartRequest
from klbench.session.state import SessionState
from klbench.session.survey import SessionSummary
from klbench.tui.measurement import Measurement
from klbench.tui.model import Reference
from klbench.tui.places_to_go import LayerPlace, RequestPlace

if TYPE_CHECKING:
    from klbench.session.comparing import Side


@dataclass
class SessionChanged(Message):
    """The log of the session, its runner or its server's log moved on; several events ride in one."""

    state: SessionState
    live: bool
    log_lines: list[str]
    log_restarted: bool


@dataclass
class Measured(Message):
    """A helper's columns are loaded; `key` names the files that they came from."""

    key: tuple[object, ...]
    measurement: Measurement


@dataclass
class SessionsListed(Message):
    summaries: list[SessionSummary]


@dataclass
class MachineKnown(Message):
    """One line on what this machine can do."""

    line: str


@dataclass
class Failed(Message):
    """Something that the user asked for could not be done."""

    error: KlbenchError


@dataclass
class ControlChanged(Message):
    """This terminal has control of the runner now, or only watches."""


@dataclass
class Perform(Message):
    """An action of the registry that the app does: it opens screens and sends commands."""

    action: str


@dataclass
class Send(Message):
    """A screen wants the runner to do something."""

    command: Command


@dataclass
class StartWork(Message):
    """The start screen wants a session with this work."""

    start: StartRequest


@dataclass
class OpenSession(Message):
    """The start screen wants this session."""

    path: Path


@dataclass
class SessionOpened(Message):
    """A runner answers for this session, or its folder is there to be read; `before` is what it repeats."""

    path: Path
    before: Side | None = None


@dataclass
class MeasuredBefore(Message):
    """A helper of the run that this session repeats is loaded."""

    measurement: Measurement


@dataclass
class Continued(Message):
    """A runner took the session up again."""

    what: str


@dataclass
class Compared(Message):
    """The klbench.compare/1 document of this session and the one that it repeats."""

    document: Mapping[str, Any]


@dataclass
class Said(Message):
    """What came of something, for the message line."""

    text: str


@dataclass
class Copy(Message):
    """The user wants this text out of the terminal."""

    text: str


@dataclass
class Wanted(Message):
    """A screen wants to show something that is not loaded."""

    reference: Reference


@dataclass
class GoTo(Message):
    """A place that the palette leads to."""

    place: RequestPlace | LayerPlace
