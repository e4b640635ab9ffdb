"""Waiting until a Textual app has come to rest: no fixed pause, and nothing that is still under way."""

import asyncio

from textual.worker import WorkerState

from klbench.tui.screens.one_picture import rests


async def settle(pilot) -> None:
    """Return when every message is worked off and no short worker is left (following never ends).

    Textual's own pause judges by the processor time that passes, which on a starved machine says idle while
    a thread has not even begun; so what is queued and what runs is looked at, and must be nothing twice.
    How a worker ends is its own affair: one that fails or is cancelled has ended.
    """
    app, quiet = pilot.app, 0
    async with asyncio.timeout(60):
        while quiet < 2:
            await pilot.pause()
            short = [worker for worker in app.workers if worker.group not in ("follow", "look")]
            await asyncio.gather(*(worker.wait() for worker in short), return_exceptions=True)
            unborn = any(worker.state is WorkerState.PENDING for worker in app.workers)
            quiet = 0 if short or unborn or _is_busy(app) else quiet + 1


async def come_to_rest(pilot) -> None:
    """As `settle`, but without Textual's pauses of a fiftieth of a second each, of which a key costs six:
    what the screen has to lay out and to draw is looked at, too."""
    app, quiet = pilot.app, 0
    async with asyncio.timeout(60):
        while quiet < 3 and app._exception is None:
            await asyncio.sleep(0.001)
            short = any(worker.group not in ("follow", "look") for worker in app.workers)
            busy = short or _is_busy(app)
            if not busy and not app._exit and app.screen._has_work:
                app.screen._on_timer_update()
                busy = True
            quiet = 0 if busy else quiet + 1


def _is_busy(app) -> bool:
    """Whether a message waits or is being worked off; an app that was left works nothing off any more."""
    pumps = (app, *app.screen_stack, *_widgets(app))
    if app._exit:
        return any(not pump._message_queue.empty() for pump in pumps)
    typed = getattr(app, "typed", ())  # the workbench's keys that no screen has had yet
    return bool(typed) or not all(pump._closing or rests(pump) for pump in pumps)


def _widgets(app):
    for screen in app.screen_stack:
        yield from screen.query("*")
