"""The runner: one job at a time, everything in the log, an end in order."""

import asyncio
import contextlib
import os
import stat

import msgspec
import pytest

from klbench.errors import KlbenchError, ServerError, UsageError
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.disk import Disk
from klbench.session.folder import make_session
from klbench.session.link import attach, send
from klbench.session.log import EventLog, read_log
from klbench.session.reading import find_runner, read_state
from klbench.session.request import StartRequest, Target
from klbench.session.runner import JobCancelled, Runner
from klbench.storage import StorageError
from tests.session.scripted import ScriptedWork

START = StartRequest(target=Target(kind="demo", model="dense"))


pytestmark = pytest.mark.usefixtures("places")


@pytest.fixture
def folder(tmp_path):
    return make_session(tmp_path / "session", *START.as_shown())


def runner_of(folder, *, attended=False, start=START, on_entry=None, **script):
    made = []

    def make_work(session):
        made.append(ScriptedWork(session, **script))
        return made[0]

    runner = Runner(folder, start, make_work, attended=attended, on_entry=on_entry)
    runner.script = made
    return runner


async def until(condition):
    """Waits until the condition holds; the deadline only ends a test that would never end."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another task's doing
            await asyncio.sleep(0)


def names(folder):
    return [type(entry.event).__name__ for entry in read_log(folder.events)]


async def test_a_job_is_in_the_log_from_its_start_to_its_end(folder):
    async with runner_of(folder) as runner:
        await runner.execute(cmd.Run(helpers=["match"]))
        assert [helper.status for helper in runner.state.run.helpers] == ["clean"]
    assert names(folder) == [
        "RunnerStarted", "JobStarted", "ServerReady", "RunStarted", "ArmStarted", "HelperEnded",
        "RunEnded", "JobEnded", "RunnerEnded",
    ]  # fmt: skip
    assert not read_state(folder).runner.alive


async def test_an_entry_is_on_disk_before_a_watcher_sees_it(folder):
    seen = []
    async with runner_of(folder, on_entry=lambda entry: seen.append(read_log(folder.events)[-1] == entry)):
        pass
    assert seen == [True, True]


async def test_a_second_job_is_refused_while_one_goes_on(folder):
    async with runner_of(folder, hold=["match"]) as runner:
        running = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: runner.state.run is not None)
        with pytest.raises(UsageError, match="busy: run all three"):
            runner.submit(cmd.Run())
        runner.script[0].hold["match"].set()
        await running


async def test_one_job_may_wait_for_the_server_to_start(folder):
    async with runner_of(folder, hold=["launch"]) as runner:
        runner.launch()
        await until(lambda: runner.state.job is not None)
        waiting = asyncio.create_task(runner.execute(cmd.Run(helpers=["match"])))
        await until(lambda: len(runner._queue) == 1)
        with pytest.raises(UsageError, match="busy"):
            runner.submit(cmd.Report())
        runner.script[0].hold["launch"].set()
        await waiting
        assert runner.state.run.helper("match").status == "clean"


async def test_a_job_may_be_given_right_behind_the_launch(folder):
    async with runner_of(folder) as runner:
        runner.launch()
        await runner.execute(cmd.Run(helpers=["match"]))
        assert runner.state.run.helper("match").status == "clean"


async def test_what_waited_for_a_server_that_does_not_start_fails_with_its_error(folder):
    async with runner_of(folder, hold=["launch"], fail="launch") as runner:
        runner.launch()
        await until(lambda: runner.state.job is not None)
        waiting = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: len(runner._queue) == 1)
        runner.script[0].hold["launch"].set()
        with pytest.raises(ServerError, match="no server"):
            await waiting
        (trouble,) = runner.state.troubles
        assert (trouble.what, trouble.why) == ("no server", "the scheduler died")


async def test_cancelling_keeps_what_the_job_had(folder):
    async with runner_of(folder, hold=["prefill_cache_hit"]) as runner:
        running = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: runner.state.run and runner.state.run.helpers[1].status == "running")
        runner.cancel()
        with pytest.raises(JobCancelled):
            await running
        assert [helper.status for helper in runner.state.run.helpers] == ["clean", "stopped", "stopped"]
        assert runner.state.last_job.outcome == "cancelled"
        with pytest.raises(UsageError, match="nothing is in progress"):
            runner.cancel()
        await runner.execute(cmd.Report())
        assert runner.state.reports == ("reports/a.md",)


async def test_a_defect_in_a_job_leaves_a_crash_file_and_a_living_runner(folder):
    async with runner_of(folder, fail="match") as runner:
        with pytest.raises(RuntimeError):
            await runner.execute(cmd.Run())
        (crash,) = folder.path.glob("crash-*.txt")
        assert "RuntimeError: boom" in crash.read_text()
        assert str(crash) in runner.state.troubles[-1].next
        await runner.execute(cmd.Report())


async def test_leaving_ends_the_job_then_the_server_then_the_runner(folder):
    async with runner_of(folder, hold=["match"]) as runner:
        job = runner.submit(cmd.Run())
        await until(lambda: runner.state.run is not None)
    assert job.outcome == "cancelled"
    assert runner.script[0].closed == 1
    assert names(folder)[-3:] == ["RunEnded", "JobEnded", "RunnerEnded"]


async def test_a_full_disk_ends_the_runner_instead_of_hanging_it(folder, monkeypatch):
    async with contextlib.AsyncExitStack() as exits:
        runner = await exits.enter_async_context(runner_of(folder, hold=["match"]))
        running = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: runner.state.run is not None)

        def full(_event):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(runner._log, "append", full)
        runner.script[0].hold["match"].set()
        with pytest.raises(StorageError, match="cannot write") as refused:
            await running
        assert "No space left" in refused.value.why
        await asyncio.wait_for(runner.serve(), 60)
        assert "No space left" in runner.stop_reason
        with pytest.raises(StorageError, match="cannot write"):
            await exits.aclose()
    assert runner.script[0].closed == 1
    assert not read_state(folder).runner.alive


async def test_work_that_cannot_be_recorded_is_not_begun(folder, monkeypatch):
    async with contextlib.AsyncExitStack() as exits:
        runner = await exits.enter_async_context(runner_of(folder))
        begun = []
        runner.script[0].run = lambda *_: begun.append(1)

        def full(_event):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(runner._log, "append", full)
        with pytest.raises(StorageError, match="cannot write"):
            await runner.execute(cmd.Run())
        assert begun == []
        with pytest.raises(StorageError, match="cannot write"):
            await exits.aclose()


async def test_a_session_is_continued_with_numbers_that_go_on(folder):
    for _ in range(2):
        async with runner_of(folder) as runner:
            await runner.execute(cmd.Run(helpers=["match"]))
    state = read_state(folder)
    assert [run.number for run in state.runs] == [1, 2]
    assert state.last_job.number == 2


async def test_two_runners_of_one_session_exclude_each_other(folder):
    async with runner_of(folder):
        with pytest.raises(UsageError, match="another klbench works"):
            await runner_of(folder).__aenter__()
        await send(folder, cmd.Ping())


async def test_a_runner_whose_session_was_taken_away_ends_without_another_word(folder, monkeypatch):
    monkeypatch.setattr(Disk, "look_every_s", 0.01)
    async with runner_of(folder, hold=["match"]) as runner:
        running = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: runner.state.run is not None)
        other = msgspec.structs.replace(folder.read_lock(), host="elsewhere", pid=7)
        folder.lock_file.write_bytes(msgspec.json.encode(other))
        written = folder.events.read_bytes()
        with pytest.raises(JobCancelled):
            await running
        await asyncio.wait_for(runner.serve(), 60)
        assert "another klbench took the session over (pid 7 on elsewhere)" in runner.stop_reason
    assert folder.events.read_bytes() == written
    assert folder.read_lock() == other
    assert runner.script[0].closed == 1


# -- the socket ---------------------------------------------------------------------------------------------


async def test_a_client_finds_the_runner_and_its_commands_are_done(folder):
    async with runner_of(folder) as runner:
        lock = find_runner(folder)
        assert lock.pid == os.getpid()
        assert stat.S_IMODE(os.stat(lock.socket).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(lock.socket)).st_mode) == 0o700
        await send(folder, cmd.Run(helpers=["match"]))
        await until(lambda: runner.state.last_job is not None)
        assert runner.state.run.helper("match").status == "clean"
    assert os.path.basename(lock.socket) not in os.listdir(os.path.dirname(lock.socket))
    with pytest.raises(UsageError, match="no runner"):
        await send(folder, cmd.Ping())


async def test_a_refusal_comes_back_with_its_reason(folder):
    async with runner_of(folder):
        with pytest.raises(UsageError, match="nothing is in progress"):
            await send(folder, cmd.Cancel())


async def test_one_connection_has_control_and_the_others_are_refused_until_it_leaves(folder):
    async with runner_of(folder) as runner:
        first, second = await attach(folder), await attach(folder)
        await first.take_control()
        with pytest.raises(UsageError, match="another terminal controls") as refused:
            await second.take_control()
        assert f"pid {os.getpid()}" in refused.value.why
        for command in (cmd.Report(), cmd.Stop(), cmd.Cancel()):
            with pytest.raises(UsageError, match="another terminal controls"):
                await second.send(command)
        await second.send(cmd.Ping())
        await first.send(cmd.Run(helpers=["match"]))
        await until(lambda: runner.state.last_job is not None)
        assert runner.state.controller.client == first.name

        await first.close()
        await until(lambda: runner.state.controller is None)
        await second.take_control()
        await second.send(cmd.Report())
        await until(lambda: runner.state.reports)
        await second.close()
    assert read_state(folder).controller is None


async def test_control_is_taken_over_only_when_asked_and_a_detach_gives_it_up(folder):
    async with runner_of(folder) as runner:
        first, second = await attach(folder), await attach(folder)
        await first.take_control()
        await second.take_control(over=True)
        assert runner.state.controller.client == second.name
        with pytest.raises(UsageError, match="another terminal controls"):
            await first.send(cmd.Stop())
        await first.close()
        assert runner.state.controller.client == second.name
        await second.send(cmd.Detach())
        assert runner.state.controller is None
        await second.close()


def test_a_killed_runner_leaves_nobody_in_control(folder):
    with EventLog(folder.events) as log:
        log.append(
            ev.RunnerStarted(klbench_version="1", pid=1, host="x", target={}, options={}),
        )
        log.append(ev.ControlTaken(client="a", terminal="pts/1", pid=3))
    assert read_state(folder).controller is None


async def test_a_stop_command_ends_the_runner(folder):
    async with runner_of(folder) as runner:
        serving = asyncio.create_task(runner.serve())
        await send(folder, cmd.Stop())
        await asyncio.wait_for(serving, 60)
    assert read_log(folder.events)[-1].event == ev.RunnerEnded(reason="stopped by the user")


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"{}\n",
        b'{"command": "fly"}\n',
        b'{"command": "run", "helpers": 7}\n',
        b"[" * 999 + b"\n",
    ],
)
async def test_a_strange_command_is_refused_and_the_next_one_done(folder, line):
    async with runner_of(folder):
        reader, writer = await asyncio.open_unix_connection(find_runner(folder).socket)
        writer.write(line)
        answer = msgspec.json.decode(await reader.readline())
        assert answer["ok"] is False
        assert "does not know" in answer["error"]["what"]
        writer.write(b'{"command": "ping"}\n')
        assert msgspec.json.decode(await reader.readline()) == {"ok": True}
        writer.close()


async def test_an_endless_command_is_hung_up_on(folder):
    async with runner_of(folder):
        reader, writer = await asyncio.open_unix_connection(find_runner(folder).socket)
        writer.write(b"x" * 1_000_000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await send(folder, cmd.Ping())


async def test_an_idle_runner_ends_but_not_while_somebody_is_attached(folder):
    async with runner_of(folder) as runner:
        attachment = await attach(folder)
        await attachment.send(cmd.Ping())
        serving = asyncio.create_task(runner.serve(keep_idle_s=0.05))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(serving), 0.3)
        await attachment.close()
        await asyncio.wait_for(serving, 60)
    assert "idle" in runner.stop_reason


async def test_a_question_waits_for_the_user_where_there_is_one(folder):
    async with runner_of(folder, attended=True) as runner:
        asked = []

        async def run(job, _helpers):
            await job.ask("flush the cache of a server in use", "3 requests are running")
            asked.append("agreed")

        runner.script[0].run = run
        running = asyncio.create_task(runner.execute(cmd.Run()))
        await until(lambda: runner.state.question is not None)
        assert asked == []
        await send(folder, cmd.Confirm())
        await running
        assert asked == ["agreed"]
        assert runner.state.question is None
        with pytest.raises(UsageError, match="asked nothing"):
            await send(folder, cmd.Confirm())


async def test_each_question_waits_for_an_answer_of_its_own(folder):
    async with runner_of(folder, attended=True) as runner:

        async def run(job, _helpers):
            await job.ask("flush the cache", "3 requests are running")
            await job.ask("start the server again", "it takes an hour")

        runner.script[0].run = run
        running = asyncio.create_task(runner.execute(cmd.Run()))

        def asks(what):
            return runner.state.question is not None and runner.state.question.what == what

        for what in ("flush the cache", "start the server again"):
            await until(lambda what=what: running.done() or asks(what))
            assert asks(what)
            await send(folder, cmd.Confirm())
        await running


async def test_a_question_without_a_user_is_an_error_that_names_the_flag(folder):
    async with runner_of(folder) as runner:

        async def run(job, _helpers):
            await job.ask("flush the cache of a server in use", "3 requests are running")

        runner.script[0].run = run
        with pytest.raises(KlbenchError) as refused:
            await runner.execute(cmd.Run())
        assert "--yes-flush" in refused.value.next


async def test_keys_never_reach_the_session(folder):
    target = Target(
        kind="launch", model_path="/m", arguments=("--api-key", "s3cret", "--admin-api-key=hidden")
    )
    start = StartRequest(target=target)
    async with runner_of(folder, start=start):
        pass
    for file in folder.path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"s3cret" not in content
            assert b"hidden" not in content
    assert read_state(folder).runner.target["arguments"] == ["--api-key", "***", "--admin-api-key=***"]
