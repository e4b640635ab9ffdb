"""Two terminals on one session: one commands, the other watches, says so, and can take over."""

import asyncio

import pytest
from pilots import press, screen_text, settle, workbench

from klbench.errors import UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.folder import make_session
from klbench.session.link import attach
from klbench.session.log import EventLog
from klbench.session.request import StartRequest, Target
from klbench.session.runner import Runner
from tests.session.scripted import ScriptedWork

START = StartRequest(target=Target(kind="demo", model="dense"))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
async def runner(tmp_path):
    folder = make_session(tmp_path / "20251129-dense", *START.as_shown())
    async with Runner(folder, START, ScriptedWork, attended=True) as runner:
        await runner.execute(cmd.Run(helpers=["match"]))
        yield runner


async def until(pilot, condition):
    async with asyncio.timeout(120):
        while not condition():
            await settle(pilot)
            await pilot.pause(0.02)


def jobs(runner):
    return runner.state.last_job.number


async def test_a_second_terminal_watches_with_a_clear_mark_and_takes_over_when_the_first_leaves(runner):
    first = await attach(runner.folder)
    await first.take_control()
    async with workbench(runner.folder.path, readonly=False) as (app, pilot):
        await until(pilot, lambda: "WATCHING" in screen_text(app))
        assert "has control" in screen_text(app)
        assert "press C" in await press(pilot, "e")
        assert jobs(runner) == 1
        await first.send(cmd.Report())
        await until(pilot, lambda: jobs(runner) == 2)

        await first.close()
        await until(pilot, lambda: "nobody has control" in screen_text(app))
        await press(pilot, "C")
        await until(pilot, lambda: "WATCHING" not in screen_text(app))
        await press(pilot, "e")
        await until(pilot, lambda: jobs(runner) == 3)
    async with asyncio.timeout(60):
        while runner.state.controller is not None:  # noqa: ASYNC110 - it learns from its socket
            await asyncio.sleep(0)


async def test_control_can_be_taken_from_a_terminal_that_hangs_and_that_one_is_told(runner):
    first = await attach(runner.folder)
    await first.take_control()
    async with workbench(runner.folder.path, readonly=False) as (app, pilot):
        await until(pilot, lambda: "WATCHING" in screen_text(app))
        assert "Take control from the other terminal?" in await press(pilot, "C")
        await press(pilot, "t")
        await until(pilot, lambda: "WATCHING" not in screen_text(app))
        with pytest.raises(UsageError, match="another terminal controls"):
            await first.send(cmd.Report())

        await first.take_control(over=True)
        await until(pilot, lambda: "WATCHING" in screen_text(app))
    await first.close()


async def test_leaving_while_watching_asks_nothing_and_stops_nothing(runner):
    first = await attach(runner.folder)
    await first.take_control()
    async with workbench(runner.folder.path, readonly=False) as (app, pilot):
        await until(pilot, lambda: "WATCHING" in screen_text(app))
        await pilot.press("q")
        await settle(pilot)
        assert app.return_code == 0
    await first.send(cmd.Ping())
    assert runner.state.controller.client == first.name
    await first.close()


@pytest.mark.parametrize(("asked", "took_s", "rings"), [(True, 60.0, 1), (False, 60.0, 0), (True, 2.0, 0)])
async def test_the_end_of_long_work_rings_where_the_user_asked_for_it(tmp_path, asked, took_s, rings):
    folder = make_session(tmp_path / "20251129-dense", *START.as_shown())
    with folder.locked(), EventLog(folder.events) as log:
        options = {"notify": asked}
        log.append(
            ev.RunnerStarted(klbench_version="1", pid=1, host="h", target={"kind": "demo"}, options=options)
        )
        log.append(ev.JobStarted(job=1, kind="run", title="run all three helpers"))
        async with workbench(folder.path) as (app, pilot):
            rung = []
            app.bell = lambda: rung.append(1)
            log.append(ev.JobEnded(job=1, outcome="done", elapsed_s=took_s))
            log.append(ev.JobStarted(job=2, kind="report", title="write the report"))
            await until(pilot, lambda: app.model.state.last_job is not None)
            log.append(ev.JobProgress(job=2, phase="writing", done=1, total=3))
            await until(pilot, lambda: app.model.state.seq == 5)
            assert len(rung) == rings
