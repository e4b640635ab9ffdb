"""The key of a server on a shared machine: made where it is needed, sent, and nowhere to be read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from klbench.engine import server_key
from klbench.engine.launching import Unobserved
from klbench.engine.pythonpath import plugin_environment
from klbench.engine.server import Server
from klbench.engine.server_key import KEY_VARIABLE, make_key
from klbench.engine.target import Demo, LaunchOptions
from klbench.errors import UsageError
from klbench.zoo import plain_token_ids, seeded_prompts

pytestmark = pytest.mark.faults


def test_a_key_is_its_owners_alone_and_in_no_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_key, "other_people", lambda: 2)
    key = make_key(tmp_path, {}, {})
    assert key is not None
    assert stat.S_IMODE(key.file.stat().st_mode) == 0o600
    assert key.value in key.file.read_text()
    assert key.value not in " ".join(key.flags)
    assert "2 other people" in key.note
    assert key.value not in key.note


def test_alone_on_a_machine_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_key, "other_people", lambda: 0)
    assert make_key(tmp_path, {}, {}) is None


@pytest.mark.parametrize("given", ["--api-key", "--admin-api-key", "--config"])
def test_what_the_user_gives_wins(tmp_path: Path, given: str) -> None:
    assert make_key(tmp_path, {given: "x"}, {KEY_VARIABLE: "always"}) is None


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="yes is no setting"):
        make_key(tmp_path, {}, {KEY_VARIABLE: "yes"})


# What sglang does: it loads plugins, sets up its logging anew, then logs its arguments.
LOGS = """
import logging, sys
from klbench_insitu.plugin import activate
activate()
logging.basicConfig(level=logging.INFO, force=True, stream=sys.stdout, format="%(message)s")
key = sys.argv[1]
logging.getLogger("a").info(f"server_args=ServerArgs(api_key='{key}')")
logging.getLogger("b").info("%s and %d", key, 7)
logging.getLogger("c").info("broken %d", "x")
"""


def test_the_key_stays_out_of_the_servers_log(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = make_key(tmp_path, {}, {KEY_VARIABLE: "always"})
    assert key is not None
    environment = plugin_environment(tmp_path, "n", cpu=False, fault=None, base_env=os.environ)
    done = subprocess.run(
        [sys.executable, "-c", LOGS, key.value],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert key.value not in done.stdout + done.stderr
    assert "api_key='***'" in done.stdout
    assert "*** and 7" in done.stdout


@pytest.mark.server
@pytest.mark.timeout(3600)
async def test_a_server_with_a_key_serves_us_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "always")
    calls: list[str] = []

    class Calls(Unobserved):
        def call(self, *args: object) -> None:
            calls.append(str(args[0]))

    server = await Server.start(Demo("dense"), LaunchOptions(), folder=tmp_path, observe=Calls())
    try:
        assert server.plan is not None
        key = server.plan.api_key
        assert key is not None
        prompts = seeded_prompts(2, 40, 1, plain_token_ids())
        columns = await server.run_helper("match", prompts, max_new_tokens=4)
        assert len(columns.token_id) == 8
        async with httpx.AsyncClient(trust_env=False) as stranger:
            refused = await stranger.post(f"{server.url}/generate", json={"input_ids": [[1, 2]]})
        assert refused.status_code == 401
        assert key not in " ".join(calls)
        assert key not in str(server.facts.as_dict()) + str(server.differs) + (server.command or "")
        assert server.log is not None
        assert key not in server.log.read_text()
        assert server.process is not None
        for pid in server.process.pids():
            assert key not in " ".join(psutil.Process(pid).cmdline())
    finally:
        await server.stop()
