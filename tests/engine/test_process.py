"""The keeper with real processes: whatever dies, nothing of a launch is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from klbench.engine.process import LaunchSpec, ServerProcess, _exit_text, end_processes_of, hide_secrets
from klbench.errors import ServerError

DEADLINE_S = 60

# Stands for a server: a child that leaves its group and a grandchild that loses its parent, as sglang's do.
SERVER = """\
#!{python}
import os, signal, sys, time
mode = sys.argv[-1]
def note(name):
    with open(os.path.join({folder!r}, "pid-" + name), "w") as file:
        file.write(str(os.getpid()))
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
hear, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("orphan")
        os.write(tell, b"x")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
note("server")
if mode == "fails":
    os.read(hear, 1)  # a server that fails before its children are there leaves none to look for
    print("Traceback (most recent call last):\\n  File x\\nValueError: no such model", flush=True)
    sys.exit(3)
time.sleep(600)
"""

RUNNER = """\
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from klbench.engine.process import LaunchSpec, ServerProcess
import os
folder = Path({folder!r})
spec = LaunchSpec(Path({python!r}), ("polite",), dict(os.environ) | {{"KLBENCH_NONCE": {nonce!r}}},
                  folder / "server.log", folder, {nonce!r})
process = ServerProcess.start(spec)
(folder / "pid-keeper").write_text(str(process.keeper_pid))
time.sleep(600)
"""


@pytest.fixture
def nonce() -> Iterator[str]:
    name = os.urandom(8).hex()
    yield name
    end_processes_of(name)


@pytest.fixture
def make_spec(tmp_path: Path, nonce: str) -> Callable[[str], LaunchSpec]:
    def make(mode: str) -> LaunchSpec:
        server = tmp_path / "server"
        server.write_text(SERVER.format(python=sys.executable, folder=str(tmp_path)))
        server.chmod(0o755)
        environment = dict(os.environ) | {"KLBENCH_NONCE": nonce}
        return LaunchSpec(server, (mode,), environment, tmp_path / "server.log", tmp_path, nonce)

    return make


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def pid_of(folder: Path, name: str) -> int:
    path = folder / f"pid-{name}"
    wait_for(lambda: path.exists() and path.read_text(), f"{name} started")
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_runner(folder: Path, nonce: str, make_spec: Callable[[str], LaunchSpec]) -> subprocess.Popen[bytes]:
    spec = make_spec("polite")
    script = RUNNER.format(path=sys.path, folder=str(folder), python=str(spec.python), nonce=nonce)
    return subprocess.Popen([sys.executable, "-c", script])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_runner_dies(
    how: signal.Signals, tmp_path: Path, nonce: str, make_spec: Callable[[str], LaunchSpec]
) -> None:
    runner = start_runner(tmp_path, nonce, make_spec)
    pids = [pid_of(tmp_path, name) for name in ("keeper", "server", "orphan")]
    assert not any(is_gone(pid) for pid in pids)
    runner.send_signal(how)
    runner.wait(DEADLINE_S)
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), f"{pid} ended")


async def test_nothing_is_left_when_the_keeper_is_killed(
    tmp_path: Path, make_spec: Callable[[str], LaunchSpec]
) -> None:
    process = ServerProcess.start(make_spec("polite"))
    pids = [pid_of(tmp_path, name) for name in ("server", "orphan")]
    os.kill(process.keeper_pid, signal.SIGKILL)
    ended = await asyncio.wait_for(process.wait_ended(), DEADLINE_S)
    assert not ended.expected
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), f"{pid} ended")


async def test_a_stopped_server_ends_politely_and_is_expected_to(
    tmp_path: Path, make_spec: Callable[[str], LaunchSpec]
) -> None:
    process = ServerProcess.start(make_spec("polite"))
    pids = [pid_of(tmp_path, name) for name in ("server", "orphan")]
    assert set(pids) <= set(process.pids())
    ended = await process.stop()
    assert ended.expected
    assert ended.exit_code == 128 + signal.SIGTERM
    assert ended.why == "stopped"
    assert all(is_gone(pid) for pid in pids)
    assert (await process.stop()).expected, "stopping twice is no error"


async def test_a_server_that_ignores_term_is_killed(
    tmp_path: Path, make_spec: Callable[[str], LaunchSpec]
) -> None:
    process = ServerProcess.start(make_spec("stubborn"))
    pids = [pid_of(tmp_path, name) for name in ("server", "orphan")]
    ended = await process.stop()
    assert ended.exit_code == 128 + signal.SIGKILL
    assert all(is_gone(pid) for pid in pids)


async def test_a_failed_server_tells_its_own_error_and_takes_its_children_along(
    tmp_path: Path, make_spec: Callable[[str], LaunchSpec]
) -> None:
    process = ServerProcess.start(make_spec("fails"))
    ended = await asyncio.wait_for(process.wait_ended(), DEADLINE_S)
    assert (ended.expected, ended.exit_code) == (False, 3)
    assert ended.why == "ValueError: no such model (exit code 3)"
    wait_for(lambda: is_gone(pid_of(tmp_path, "orphan")), "the orphan ended")


async def test_a_server_killed_by_the_kernel_says_so(
    tmp_path: Path, make_spec: Callable[[str], LaunchSpec]
) -> None:
    process = ServerProcess.start(make_spec("polite"))
    os.kill(pid_of(tmp_path, "server"), signal.SIGKILL)
    ended = await asyncio.wait_for(process.wait_ended(), DEADLINE_S)
    assert ended.exit_code == 137
    assert "memory runs out" in ended.why


@pytest.mark.parametrize(("explained", "guessed"), [(True, False), (False, True)])
def test_what_the_log_explains_is_not_explained_by_memory(explained: bool, guessed: bool) -> None:
    """sglang ends itself with SIGKILL after an exception of its scheduler."""
    assert ("memory runs out" in _exit_text(137, explained=explained)) is guessed


def test_a_python_that_cannot_be_run_is_an_error_before_anything_starts(
    make_spec: Callable[[str], LaunchSpec],
) -> None:
    spec = make_spec("polite")
    spec.python.chmod(0o644)
    with pytest.raises(ServerError, match="cannot run"):
        ServerProcess.start(spec)
    assert not spec.log.exists()


def test_the_shown_command_repeats_the_launch_without_its_keys(
    make_spec: Callable[[str], LaunchSpec], nonce: str
) -> None:
    line = make_spec("--api-key").as_line()
    assert line.startswith(f"KLBENCH_NONCE={nonce} ")
    assert "-m sglang.launch_server" in line
    shown = hide_secrets(["--api-key", "s3cret", "--admin-api-key=s3cret", "--port", "1"])
    assert shown == ["--api-key", "***", "--admin-api-key=***", "--port", "1"]
