"""What the parts of the workbench say to each other. Workers never touch widgets: they post these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual.message import Message

from klbench.errors import KlbenchError
from klbench.session.commands import Command
from klbench.session.link import SessionSummary
from klbench.session.request import StartRequest
from klbench.session.state import SessionState
from klbench.tui.measurement import Measurement


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
    """A runner answers for this session, or its folder is there to be read."""

    path: Path
