"""The life of a runner of its own: no terminal, orders through its socket, an end in order on any signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from klbench.errors import ExitCode, UsageError
from klbench.session.commands import Continue, Run
from klbench.session.folder import make_session
from klbench.session.interruption import interrupted
from klbench.session.link import RunnerOrder
from klbench.session.request import MAX_REQUEST_BYTES
from klbench.session.runner import Runner, Session, Work


def run_detached(
    session: Path, order: bytes, make_work: Callable[[Session], Work], *, keep_idle_s: float | None = None
) -> int:
    """Works until it is stopped, signalled, or idle with nobody attached; returns the exit code."""
    try:
        asked = msgspec.json.decode(order[:MAX_REQUEST_BYTES], type=RunnerOrder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("cannot read what to start", why=str(error)) from error
    return asyncio.run(_live(session, asked, make_work, keep_idle_s))


async def _live(
    session: Path, order: RunnerOrder, make_work: Callable[[Session], Work], keep_idle_s: float | None
) -> int:
    target, options = order.start.as_shown()
    folder = make_session(session, target, options)
    exit_code = ExitCode.CONSISTENT
    async with Runner(folder, order.start, make_work, attended=True) as runner:
        loop = asyncio.get_running_loop()

        def stop(signum: int) -> None:
            nonlocal exit_code
            exit_code = ExitCode(128 + signum)
            runner.stop(f"ended by {signal.Signals(signum).name}")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        # The terminal that started us may go: that is a detach, not an end.
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        runner.launch()
        if order.run_first:
            runner.submit(
                Run() if interrupted(runner.state) is None or not order.continue_run else Continue()
            )
        await runner.serve(keep_idle_s=keep_idle_s)
    return exit_code
