"""What a killed keeper leaves is found and ended; what has a keeper, or is not ours, is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from klbench.engine import keeper
from klbench.engine.orphans import find_orphans
from klbench.engine.process import LaunchSpec, ServerProcess

pytestmark = pytest.mark.faults

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that waits, with the environment of a launch of ours."""
    started: list[subprocess.Popen[bytes]] = []

    def start(nonce: str, control: str = "control") -> subprocess.Popen[bytes]:
        (tmp_path / "server.log").touch()
        environment = dict(os.environ) | {
            "KLBENCH_NONCE": nonce,
            "KLBENCH_INSITU_DIR": str(tmp_path / control),
        }
        wait = "import sys; print(flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", wait], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pids_under(place: Path) -> list[int]:
    return [pid for orphans in find_orphans() if orphans.place == place for pid in orphans.pids]


def test_processes_of_a_launch_without_a_keeper_are_found_and_ended(start: Start, tmp_path: Path) -> None:
    left = [start("nonce-a"), start("nonce-a")]
    (orphans,) = [orphans for orphans in find_orphans() if orphans.place == tmp_path]
    assert orphans.pids == tuple(sorted(process.pid for process in left))
    assert str(tmp_path) in orphans.sentence
    assert sorted(orphans.end()) == sorted(orphans.pids)
    assert not any(psutil.pid_exists(process.pid) for process in left)
    assert not pids_under(tmp_path)


def test_a_server_of_the_users_own_launch_is_never_counted(start: Start, tmp_path: Path) -> None:
    start("nonce-b", control="klb-attach")
    assert not pids_under(tmp_path)


@pytest.mark.parametrize("another_copy", [False, True])
async def test_a_launch_with_its_keeper_is_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_copy: bool
) -> None:
    if another_copy:
        copy = tmp_path / "keeper.py"
        shutil.copyfile(keeper.__file__, copy)
        monkeypatch.setattr("klbench.engine.process.keeper", SimpleNamespace(__file__=str(copy)))
    server = tmp_path / "server"
    server.write_text(f"#!{sys.executable}\nimport time\nprint('up', flush=True)\ntime.sleep(600)\n")
    server.chmod(0o755)
    (tmp_path / "control").mkdir()
    environment = dict(os.environ) | {
        "KLBENCH_NONCE": "nonce-c",
        "KLBENCH_INSITU_DIR": str(tmp_path / "control"),
    }
    spec = LaunchSpec(server, (), environment, tmp_path / "server.log", tmp_path / "control", "nonce-c")
    process = ServerProcess.start(spec)
    try:
        assert not pids_under(tmp_path)
    finally:
        await process.stop()
