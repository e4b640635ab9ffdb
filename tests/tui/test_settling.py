"""What settling waits for, and what it does not care about."""

import asyncio

import pytest
from textual.app import App
from textual.worker import WorkerState

from tests.settling import settle


@pytest.mark.parametrize(
    ("ends_by", "ended"),
    [(ValueError, WorkerState.ERROR), (asyncio.CancelledError, WorkerState.CANCELLED)],
)
async def test_work_that_ends_badly_while_it_is_waited_for_has_ended(monkeypatch, ends_by, ended):
    awaited = asyncio.Event()

    async def work() -> None:
        await awaited.wait()
        raise ends_by

    async with App().run_test() as pilot:
        worker = pilot.app.run_worker(work(), group="load", exit_on_error=False)
        wait = worker.wait

        async def wait_and_say() -> None:
            awaited.set()
            await wait()

        monkeypatch.setattr(worker, "wait", wait_and_say)
        await settle(pilot)
        assert worker.state is ended
