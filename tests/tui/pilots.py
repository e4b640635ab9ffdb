"""Driving the workbench in tests: press keys until nothing is under way, read the screen as text."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import msgspec
import recorded

from klbench.session import commands as cmd
from klbench.session.control import ControlSocket
from klbench.session.folder import SessionFolder
from klbench.tui.app import WorkbenchApp
from tests.settling import settle

NOW = recorded.BEGAN_AT + 61.0


def screen_text(app) -> str:
    """What the terminal would show, without trailing blanks."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


async def until(pilot, condition, deadline_s=60.0) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - the follower polls a file
            await asyncio.sleep(0.02)
    await settle(pilot)


@contextlib.asynccontextmanager
async def workbench(session: Path | None = None, *, size=(80, 24), readonly=True, **options):
    """The app on a session, settled. A defect in the work behind it is raised at the end."""
    app = WorkbenchApp(session=session, readonly=readonly, clock=lambda: NOW, **options)
    defects, tell = [], app.say_defect

    def tell_and_keep(error: BaseException) -> None:
        defects.append(error)
        tell(error)

    app.say_defect, app.defects = tell_and_keep, defects
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(pilot)
        yield app, pilot
    for defect in defects:
        raise defect


async def press(pilot, *keys: str) -> str:
    """Press keys one by one; the text of the screen afterwards."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)
    return screen_text(pilot.app)


@contextlib.asynccontextmanager
async def scripted_runner(path: Path):
    """A socket that accepts every command and keeps it: what a runner would have been told.

    The lock names this process, so the session counts as live.
    """
    from klbench.session.control import new_socket_path
    from klbench.session.process_identity import process_start, this_host

    told = []

    def accept(command, _client) -> None:
        if not isinstance(command, cmd.Control):
            told.append(command)
        if isinstance(command, cmd.Stop):
            folder.lock_file.unlink()  # it is gone as soon as it was told

    socket = ControlSocket(new_socket_path(), accept)
    await socket.open()
    lock = {"host": this_host(), "pid": os.getpid(), "start": process_start(os.getpid()) or "",
            "socket": str(socket.path), "taken_at": time.time()}  # fmt: skip
    folder = SessionFolder(path)
    folder.lock_file.write_bytes(msgspec.json.encode(lock))
    try:
        yield told
    finally:
        folder.lock_file.unlink(missing_ok=True)
        await socket.close()
