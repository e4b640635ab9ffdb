"""A runner of its own: spawned, found, outliving its client, ended in order. No server is needed for that:
the target names a Python that is not there."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from klbench.errors import UndecidedError, UsageError
from klbench.session import commands as cmd
from klbench.session import link
from klbench.session.folder import make_session
from klbench.session.reading import find_runner, read_state
from klbench.session.request import Options, StartRequest, Target
from klbench.session.survey import list_sessions

NOWHERE = StartRequest(
    target=Target(kind="launch", model_path="org/model"),
    options=Options(server_python="/nowhere/python"),
)


pytestmark = pytest.mark.usefixtures("places")


@pytest.fixture
async def folder():
    folder = await link.start_session(NOWHERE, run_first=False)
    yield folder
    if (lock := find_runner(folder)) is not None:
        os.kill(lock.pid, signal.SIGKILL)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another process's doing
            await asyncio.sleep(0.02)


async def launched(folder):
    """Waits until the launch has failed, as it must."""
    await until(lambda: read_state(folder).last_job is not None)
    return read_state(folder)


async def test_a_runner_that_cannot_launch_says_why_and_stays_reachable(folder):
    state = await launched(folder)
    assert state.runner.alive
    assert state.last_job.outcome == "failed"
    assert "no Python with sglang" in state.troubles[-1].what
    await link.send(folder, cmd.Ping())
    await link.send(folder, cmd.Stop())
    await until(lambda: find_runner(folder) is None)
    assert read_state(folder).runner.ended == "stopped by the user"


async def test_a_runner_has_a_terminal_session_of_its_own_and_survives_a_hang_up(folder):
    await launched(folder)
    lock = find_runner(folder)
    assert os.getsid(lock.pid) == lock.pid
    os.kill(lock.pid, signal.SIGHUP)
    await link.send(folder, cmd.Ping())
    assert find_runner(folder) == lock


async def test_a_terminated_runner_ends_in_order(folder):
    await launched(folder)
    os.kill(find_runner(folder).pid, signal.SIGTERM)
    await until(lambda: find_runner(folder) is None)
    assert read_state(folder).runner.ended == "ended by SIGTERM"


async def test_a_killed_runner_is_known_to_be_dead_and_its_session_can_be_continued(folder):
    await launched(folder)
    first = find_runner(folder)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: find_runner(folder) is None)
    assert not read_state(folder).runner.alive
    with pytest.raises(UsageError, match="no runner"):
        await link.attach(folder)
    await link.spawn_runner(folder, link.recorded_start(folder), run_first=False)
    assert find_runner(folder).pid != first.pid


async def test_the_server_of_a_session_is_started_again_and_nothing_is_measured(folder):
    await launched(folder)
    await link.send(folder, cmd.Stop())
    await until(lambda: find_runner(folder) is None)
    before = read_state(folder)
    await link.start_server_again(folder)
    assert find_runner(folder) is not None
    await until(lambda: read_state(folder).last_job.number > before.last_job.number)
    state = read_state(folder)
    assert (state.last_job.kind, state.job) == ("launch", None)
    assert state.runs == before.runs
    with pytest.raises(UsageError, match="a runner works on the session already"):
        await link.start_server_again(folder)


async def test_a_second_runner_is_refused(folder):
    with pytest.raises(UsageError, match="a runner works on the session already"):
        await link.spawn_runner(folder, NOWHERE, run_first=False)


async def test_a_runner_that_dies_at_once_is_reported_with_its_last_words(tmp_path, monkeypatch):
    session = make_session(tmp_path / "session", *NOWHERE.as_shown())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").rmdir()
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setattr(link.sys, "executable", "/bin/false")
    with pytest.raises(UndecidedError, match="ended at once with exit code 1"):
        await link.spawn_runner(session, NOWHERE, run_first=False)


def test_a_runner_outlives_the_process_that_started_it(tmp_path):
    program = (
        "import asyncio, sys, pathlib\n"
        "from klbench.session import link\n"
        "from tests.session.test_link import NOWHERE\n"
        "start = link.start_session(NOWHERE, session=pathlib.Path(sys.argv[1]), run_first=False)\n"
        "asyncio.run(start)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "session")], check=True)
    session = make_session(tmp_path / "session", *NOWHERE.as_shown())
    lock = find_runner(session)
    assert lock is not None
    (summary,) = list_sessions([session])
    assert (summary.status, summary.label) == ("running", "model")
    os.kill(lock.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while find_runner(session) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_session_launched_with_a_key_is_not_continued_without_it(tmp_path):
    target = Target(kind="launch", model_path="m", arguments=("--api-key", "s3cret"))
    session = make_session(tmp_path / "session", *StartRequest(target=target).as_shown())
    with pytest.raises(UsageError, match="cannot continue"):
        link.recorded_start(session)
