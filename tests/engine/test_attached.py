"""A server that was started with our exports is found again by its port, and no other is taken for it."""

import json
import os
import socket
import subprocess
import sys
from functools import partial

import pytest

from klbench.engine import attached
from klbench.engine.attached import find_control
from klbench.engine.path_map import read_path_map
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


async def test_a_server_without_our_plugin_is_not_taken_for_another_ones(root, listening, monkeypatch):
    monkeypatch.setattr(attached, "_WRITTEN_LIMIT_S", 0.05)
    presence(root, "aaaa", 1)
    assert await find_control(root, listening, 1, ask=silent) is None


async def test_a_rank_without_the_plugin_is_an_error_and_not_a_guess(root, listening):
    presence(root, "bbbb", os.getpid())
    with pytest.raises(ServerError, match="present in 1 of 2 ranks"):
        await find_control(root, listening, 2)


async def test_a_folder_that_others_can_write_is_left_alone(root, listening):
    presence(root, "bbbb", os.getpid()).chmod(0o777)
    assert await find_control(root, listening, 1) is None


async def test_no_folder_at_all_is_no_error(tmp_path, listening):
    assert await find_control(tmp_path / "none", listening, 1) is None


def writes(folder):
    """The server's side: its plugin writes down the requests of its own nonce."""

    async def ask(rids):
        own = [rid for rid in rids if rid.startswith(f"klb-{folder.name}-")]
        line = {"n": 1, "mode": "extend", "rows": 1, "requests": [[rid, 0, 1, 0, 1, "extend"] for rid in own]}
        (folder / "forwards-0.jsonl").write_text(json.dumps(line) + "\n")

    return ask


async def silent(_rids):
    """A server without our plugin answers, and nothing is written."""


async def test_where_processes_cannot_be_seen_the_plugin_that_writes_the_nonce_down_is_the_servers(root):
    presence(root, "dead", 1)
    living = presence(root, "bbbb", 2)
    found = await find_control(root, "http://192.0.2.7:30000", 1, ask=writes(living))
    assert (found.control_dir, found.nonce) == (living, "bbbb")
    assert "was found there" in found.note


async def test_a_server_is_sent_nothing_before_its_user_agreed(root):
    living, asked = presence(root, "bbbb", 2), []
    presence(root, "dead", 1)

    async def sent(_rids):
        raise AssertionError

    async def agree(requests, *, answer):
        asked.append(requests)
        return answer

    url = "http://192.0.2.7:30000"
    assert await find_control(root, url, 1, ask=sent, agree=partial(agree, answer=False)) is None
    found = await find_control(root, url, 1, ask=writes(living), agree=partial(agree, answer=True))
    assert found.control_dir == living
    assert asked == [2, 2]


async def test_a_port_that_another_process_forwards_is_no_obstacle(root, listening):
    living = presence(root, "bbbb", 1)
    assert (await find_control(root, listening, 1, ask=writes(living))).control_dir == living


async def test_a_server_that_writes_nothing_down_has_none_of_our_folders(root, monkeypatch):
    monkeypatch.setattr(attached, "_WRITTEN_LIMIT_S", 0.05)
    presence(root, "dead", 1)
    assert await find_control(root, "http://192.0.2.7:30000", 1, ask=silent) is None


@pytest.mark.parametrize("mapped", ["seen", "seen/attach", "seen/attach/bbbb"])
async def test_a_mapped_folder_is_looked_into_wherever_in_it_the_user_points(root, tmp_path, mapped):
    (tmp_path / "seen" / "attach").mkdir(parents=True)
    living = presence(tmp_path / "seen" / "attach", "bbbb", 2)
    living.chmod(0o755)
    paths = read_path_map([f"/of/the/server={tmp_path / mapped}"])
    found = await find_control(root, "http://192.0.2.7:30000", 1, ask=writes(living), paths=paths)
    assert found.control_dir == living
