"""What the workbench asks of runners and of session folders: start, attach, send, continue, repeat, load.

Everything here is slow and runs in workers; none of it touches a widget, it posts messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from textual.message import Message

from klbench.errors import ExitCode, KlbenchError, UsageError
from klbench.session import commands as cmd
from klbench.session import link
from klbench.session.folder import SessionFolder
from klbench.session.reading import find_runner
from klbench.session.request import StartRequest
from klbench.session.state import HelperState, RunState
from klbench.tui import messages
from klbench.tui.measurement import load_measurement
from klbench.tui.model import MeasurementKey, Model

if TYPE_CHECKING:
    from klbench.session.comparing import Side

STOP_WAIT_S = 30.0
"""How long a stop waits for the runner to end its server: sglang itself takes up to ten seconds."""


class Connection:
    """The runner's side of the workbench. One runner at a time, found through the model's session."""

    def __init__(self, model: Model, post: Callable[[Message], object]) -> None:
        self._model = model
        self._post = post
        self._attachment: link.Attachment | None = None

    @property
    def name(self) -> str | None:
        """By which the runner knows this terminal; None while there is no connection."""
        return self._attachment.name if self._attachment is not None else None

    async def close(self) -> None:
        if self._attachment is not None:
            await self._attachment.close()
            self._attachment = None

    async def begin(self, start: StartRequest) -> None:
        """Start a session with this work."""
        await self._reported(self._begin(start))

    async def _begin(self, start: StartRequest) -> None:
        folder = await link.start_session(start)
        self._post(messages.SessionOpened(folder.path))

    async def connect(self, folder: SessionFolder) -> None:
        """Hold a connection, which tells the runner that somebody watches."""
        with contextlib.suppress(KlbenchError):
            await self._attached(folder)

    async def take_control(self) -> None:
        """Take control of the runner, from another terminal where that has it."""
        if self._model.folder is not None:
            await self._reported(self._take_control(self._model.folder))

    async def _take_control(self, folder: SessionFolder) -> None:
        await self._ask_control(await self._attached(folder), over=True)

    async def send(self, command: cmd.Command) -> None:
        """Have the runner do something; what it refuses is posted as a failure."""
        if self._model.folder is not None:
            await self._reported(self._send(self._model.folder, command))

    async def _send(self, folder: SessionFolder, command: cmd.Command) -> None:
        try:
            await (await self._attached(folder)).send(command)
        except KlbenchError as error:
            if error.exit_code == ExitCode.NO_SERVER:
                self._attachment = None
            raise

    async def continue_session(self, folder: SessionFolder) -> None:
        """Start a runner that takes the session up again."""
        await self._reported(self._continue(folder))

    async def _continue(self, folder: SessionFolder) -> None:
        self._post(messages.Continued(await link.continue_session(folder)))

    async def start_server(self, folder: SessionFolder) -> None:
        """Start a runner that has the session's server again, and measures nothing."""
        await self._reported(self._start_server(folder))

    async def _start_server(self, folder: SessionFolder) -> None:
        self._post(messages.Continued(await link.start_server_again(folder)))

    async def repeat(self, folder: SessionFolder, *, stop: bool) -> None:
        """The same once more in a new session; where `stop`, after the runner of this one has ended."""
        await self._reported(self._repeat(folder, stop=stop))

    async def _repeat(self, folder: SessionFolder, *, stop: bool) -> None:
        from klbench.session.liking import start_like

        start, side = start_like(folder)
        if stop:
            await self._send(folder, cmd.Stop())
            await _until_gone(folder)
        await self.close()
        made = await link.start_session(start)
        self._post(messages.SessionOpened(made.path, side))

    async def compare(self, before: Side, folder: SessionFolder) -> None:
        """The session beside the one that it repeats."""
        await self._reported(self._compare(before, folder))

    async def _compare(self, before: Side, folder: SessionFolder) -> None:
        from klbench.session import comparing

        after = comparing.side_of(folder, self._model.state)
        self._post(messages.Compared(await comparing.compare(before, after, anyway=True)))

    def load_before(self, before: Side) -> None:
        """Read the columns of the run that this session repeats; for a thread."""
        for helper in before.run.helpers:
            with contextlib.suppress(KlbenchError):
                measurement = load_measurement(before.folder, before.run.number, helper)
                self._post(messages.MeasuredBefore(measurement))

    async def stop(self) -> None:
        """Stop the runner and return once it is gone, or STOP_WAIT_S has passed."""
        await self.send(cmd.Stop())
        if self._model.folder is not None:
            await _until_gone(self._model.folder)

    async def _attached(self, folder: SessionFolder) -> link.Attachment:
        if self._attachment is None:
            self._attachment = await link.attach(folder)
            await self._ask_control(self._attachment, over=False)
        return self._attachment

    async def _ask_control(self, attachment: link.Attachment, *, over: bool) -> None:
        """Have this terminal's commands taken, or watch where another terminal has control."""
        try:
            await attachment.take_control(over=over)
        except UsageError:
            self._model.watching = True
        else:
            self._model.watching = False
        self._post(messages.ControlChanged())

    async def _reported(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except KlbenchError as error:
            self._post(messages.Failed(error))

    def load(self, key: MeasurementKey, folder: SessionFolder, run: RunState, helper: HelperState) -> None:
        """Read a helper's columns; for a thread."""
        try:
            measurement = load_measurement(folder, run.number, helper)
        except KlbenchError as error:
            self._post(messages.Failed(error))
        else:
            self._post(messages.Measured(key, measurement))


async def _until_gone(folder: SessionFolder) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_WAIT_S):
            # It is another process: there is no event to wait for.
            while find_runner(folder) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
