"""A server that was started with our exports is found again by its port, and no other is taken for it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from klbench.engine.attached import find_control
from klbench.errors import ServerError


def presence(root, nonce, pid, *, rank=0, stage="model_loaded", error=None):
    folder = root / nonce
    folder.mkdir(mode=0o700, exist_ok=True)
    content = {
        "version": "0.1.0", "pid": pid, "role": "scheduler", "rank": rank, "nonce": nonce, "stage": stage,
        "hooks": [], "faults": [], "error": error,
    }  # fmt: skip
    (folder / f"presence-scheduler-{rank}-{pid}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def root(tmp_path):
    (tmp_path / "attach").mkdir(mode=0o700)
    return tmp_path / "attach"


@pytest.fixture
def listening():
    """A socket of this process, as the server's own, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_the_folder_of_the_process_that_listens_is_the_servers(root, listening):
    presence(root, "aaaa", 1)
    mine = presence(root, "bbbb", os.getpid())
    found = await find_control(root, listening, 1)
    assert (found.control_dir, found.nonce, found.ranks, found.note) == (mine, "bbbb", [0], "")


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_a_child_of_the_listener_belongs_to_it(root, listening, child):
    presence(root, "bbbb", child.pid)
    assert (await find_control(root, listening, 1)).nonce == "bbbb"


async def test_a_server_without_our_plugin_is_not_taken_for_another_ones(root, listening):
    presence(root, "aaaa", 1)
    assert await find_control(root, listening, 1) is None


async def test_a_rank_without_the_plugin_is_an_error_and_not_a_guess(root, listening):
    presence(root, "bbbb", os.getpid())
    with pytest.raises(ServerError, match="present in 1 of 2 ranks"):
        await find_control(root, listening, 2)


async def test_a_folder_that_others_can_write_is_left_alone(root, listening):
    presence(root, "bbbb", os.getpid()).chmod(0o777)
    assert await find_control(root, listening, 1) is None


async def test_no_folder_at_all_is_no_error(tmp_path, listening):
    assert await find_control(tmp_path / "none", listening, 1) is None


async def answer(folder, nonce):
    """The server's side of the control file, once."""
    control = folder / "capture-control.json"
    while not control.exists():  # noqa: ASYNC110 - another process' doing in real life
        await asyncio.sleep(0)
    asked = json.loads(control.read_text())
    reply = {"seq": asked["seq"], "nonce": nonce, "ok": True, "error": None}
    (folder / "capture-ack-0.json").write_text(json.dumps(reply))


async def test_of_servers_elsewhere_the_only_one_that_answers_is_taken_and_said(root):
    presence(root, "dead", 1)
    living = presence(root, "bbbb", 2)
    answering = asyncio.create_task(answer(living, "bbbb"))
    try:
        found = await find_control(root, "http://192.0.2.7:30000", 1)
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
    assert found.control_dir == living
    assert "the only one" in found.note
