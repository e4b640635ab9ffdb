"""A disk that fills up or is read-only: the work ends in order and says so, what was written is readable, and
with room again it goes on. The disks are real small ones."""

import asyncio
import contextlib
import json
import os
import subprocess

import pytest

from klbench.cli import main
from klbench.cli.headless import Plan, execute
from klbench.core.columns import HELPERS
from klbench.errors import ExitCode
from klbench.session import commands as cmd
from klbench.session import events as ev
from klbench.session.disk import RESERVE_BYTES, Disk
from klbench.session.folder import SessionFolder, make_session
from klbench.session.log import read_log
from klbench.session.reading import read_state
from klbench.session.runner import Runner
from klbench.storage import StorageError, too_little_room
from tests.session.fake_engine import FakeBench
from tests.session.scripted import ScriptedWork
from tests.session.test_continuing import START, arms_run

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("places")]


class SmallDisk:
    """A tmpfs of its own."""

    def __init__(self, path):
        self.path = path

    def fill(self, leave=0):
        """Takes all the room but `leave` bytes."""
        status = os.statvfs(self.path)
        room = status.f_bavail * status.f_frsize - leave
        with contextlib.suppress(OSError), open(self.path / "filler", "ab") as file:
            file.write(b"x" * max(0, room))

    def clear(self):
        (self.path / "filler").unlink(missing_ok=True)

    def read_only(self, yes=True):
        subprocess.run(["mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def run(session, make_work=FakeBench):
    place = session.parent.parent / "result.json"
    code = execute(START, Plan("run"), session=session, json_place=str(place), make_work=make_work)
    return code, json.loads(place.read_text())


def filling(disk, helper):
    """A bench whose disk is full once that helper has been measured and before it can be written."""

    class Filling(FakeBench):
        def __init__(self, session):
            super().__init__(session)
            measure = self.fake.run_helper

            async def run_helper(name, *arguments, **options):
                columns = await measure(name, *arguments, **options)
                if name == helper:
                    disk.fill()
                return columns

            self.fake.run_helper = run_helper

    return Filling


@pytest.mark.parametrize("helper", HELPERS)
def test_a_disk_that_fills_up_ends_the_run_and_with_room_again_it_goes_on(disk, tmp_path, capfd, helper):
    _, whole = run(tmp_path / "elsewhere" / "whole")
    capfd.readouterr()
    session = disk.path / "session"
    code, document = run(session, filling(disk, helper))
    assert code == ExitCode.UNDECIDED
    assert document["error"]["what"].startswith(f"cannot write {session}/")
    assert "No space left on device" in document["error"]["why"]
    assert "free some space" in document["error"]["next"]
    done = HELPERS[: HELPERS.index(helper)]
    assert {name: document["helpers"][name] for name in done} == {
        name: whole["helpers"][name] for name in done
    }
    assert document["helpers"][helper]["status"] == "not_run"
    # The log itself says why it ended, and that it did.
    log = [entry.event for entry in read_log(session / "events.jsonl")]
    assert isinstance(log[-1], ev.RunnerEnded)
    assert any(isinstance(event, ev.Trouble) and "cannot write" in event.what for event in log)
    assert not list(session.glob("crash-*"))
    assert not list(session.rglob(".*"))

    disk.clear()
    capfd.readouterr()
    code, document = run(session)
    assert (code, document["helpers"]) == (ExitCode.DIVERGED, whole["helpers"])
    # The generation arm was kept before the disk was full.
    assert arms_run(capfd)[0] == (helper, "scoring")


def test_a_log_that_cannot_grow_ends_the_runner_with_its_last_words(disk, capsys):
    class Talking(ScriptedWork):
        async def run(self, _job, _helpers):
            disk.fill()
            for number in range(100_000):
                self.session.emit(ev.Call(line="x" * 5000, outcome=str(number), elapsed_s=0.0))
                await asyncio.sleep(0)

    session = disk.path / "session"
    code, document = run(session, Talking)
    assert code == ExitCode.UNDECIDED
    assert f"cannot write {session / 'events.jsonl'}" in document["error"]["what"]
    state = read_state(SessionFolder(session))
    assert "No space left on device" in state.runner.ended
    assert "cannot write" in state.troubles[-1].what
    assert state.last_job.outcome == "failed"
    assert "defect" not in capsys.readouterr().err
    numbers = [entry.seq for entry in read_log(session / "events.jsonl")]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_floor_of_free_space_stops_a_job_and_not_its_runner(disk, monkeypatch):
    monkeypatch.setattr(Disk, "look_every_s", 0.01)
    folder = make_session(disk.path / "session", *START.as_shown())

    def held(session):
        return ScriptedWork(session, hold=["match"])

    async with Runner(folder, START, held, attended=True) as runner:
        running = asyncio.create_task(runner.execute(cmd.Run()))
        async with asyncio.timeout(60):
            while runner.state.run is None:  # noqa: ASYNC110 - the condition is another task's doing
                await asyncio.sleep(0)
        assert too_little_room(folder.path) is None
        disk.fill(leave=16 * 1024)
        with pytest.raises(StorageError, match=r"before the disk of .* is full") as stopped:
            await running
        assert "free some space" in stopped.value.next
        assert runner.state.last_job.outcome == "failed"
        disk.clear()
        await runner.execute(cmd.Report())
        assert runner.state.reports


def test_the_reserve_lasts_as_long_as_the_runner(disk):
    folder = make_session(disk.path / "session", *START.as_shown())
    with Disk(folder, None):
        assert (folder.path / "reserve").stat().st_size == RESERVE_BYTES
    assert not (folder.path / "reserve").exists()


def test_a_report_that_does_not_fit_leaves_no_half_of_itself(disk, capsys):
    session = disk.path / "session"
    run(session)
    disk.fill()
    for arguments in (["report", str(session)], ["report", str(session), "--bundle", "--format", "md"]):
        assert main(arguments) == ExitCode.UNDECIDED
        told = capsys.readouterr().err
        assert "cannot write" in told
        assert "No space left on device" in told
        assert "defect" not in told
    assert list((session / "reports").iterdir()) == []


def test_a_full_disk_at_the_start_is_said_without_a_start(disk, capsys):
    disk.fill()
    assert main(["run", "--demo", "--session", str(disk.path / "new")]) == ExitCode.UNDECIDED
    told = capsys.readouterr().err
    assert "cannot write" in told
    assert "No space left on device" in told
    assert "defect" not in told


def test_a_session_on_a_read_only_disk_is_read_and_reported_from(disk, tmp_path, capsys):
    session = disk.path / "session"
    run(session)
    disk.read_only()
    capsys.readouterr()
    assert main(["open", str(session)]) == ExitCode.CONSISTENT
    assert "match" in capsys.readouterr().out
    assert main(["compare", str(session), str(session)]) == ExitCode.CONSISTENT
    assert main(["report", str(session), "--format", "md", "--output", str(tmp_path / "a.md")]) == 0
    assert "klbench report" in (tmp_path / "a.md").read_text()
    bundle = tmp_path / "a.klbench.zip"
    assert main(["report", str(session), "--bundle", "--output", str(bundle)]) == 0
    assert main(["open", str(bundle)]) == ExitCode.CONSISTENT
    capsys.readouterr()
    for arguments in (["report", str(session)], ["open", "--continue", str(session)]):
        code = main(arguments)
        told = capsys.readouterr().err
        assert code in (ExitCode.UNDECIDED, ExitCode.USAGE), told
        assert "Traceback" not in told
    code = main(["run", "--demo", "--session", str(session)])
    told = capsys.readouterr().err
    assert code in (ExitCode.UNDECIDED, ExitCode.USAGE)
    assert "Read-only file system" in told
    disk.read_only(False)
