"""What sglang's own check finds of its cache stands in its log alone, and is a lead to a wrong restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from klbench.cli.headless import Plan
from klbench.engine.disorder import CacheChecks
from klbench.errors import ExitCode
from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state
from klbench.session.request import Options, StartRequest, Target
from klbench.session.state import TroubleLine
from tests.session.fake_engine import Server
from tests.session.test_attached_manners import run

pytestmark = pytest.mark.usefixtures("places")

LEAK = "[2026-11-30 19:00:00] WARNING: full token_to_kv_pool memory leak detected! available_size=5, size=9\n"
START = StartRequest(target=Target(kind="demo", model="dense"), options=Options(samples=3, max_new_tokens=6))


def said_of(tmp_path: Path, log: Path | None) -> list[TroubleLine]:
    code, _ = run(tmp_path, START, Plan("run"), log=log)
    assert code == ExitCode.DIVERGED
    troubles = read_state(SessionFolder(tmp_path / "session")).troubles
    return [line for line in troubles if "disorder" in line.what]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """With an old complaint, which is no news."""
    file = tmp_path / "server.log"
    file.write_text("The server is fired up\n" + LEAK)
    return file


def test_a_leak_that_the_server_only_logs_is_told_as_a_lead(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Server.run_helper

    async def leaking(self: Server, helper: str, *args: Any, **more: Any) -> Any:
        columns = await measure(self, helper, *args, **more)
        if helper == "prefill_cache_hit":
            with log.open("a") as file:
                file.write(LEAK + "more of it\n" + LEAK)
        return columns

    monkeypatch.setattr(Server, "run_helper", leaking)
    (said,) = said_of(tmp_path, log)
    assert (said.level, said.why) == ("warning", LEAK.strip())
    assert "a lead to a wrong restore (condition 2): keep the log and the prompts" in said.next


@pytest.mark.parametrize("with_log", [True, False])
def test_a_server_that_complains_of_nothing_new_is_not_accused(
    log: Path, tmp_path: Path, with_log: bool
) -> None:
    assert said_of(tmp_path, log if with_log else None) == []


def test_a_word_that_comes_late_is_read_with_the_next_look(log: Path) -> None:
    checks = CacheChecks(log)
    assert checks.news() is None
    with log.open("a") as file:
        file.write("idle\nsegment at 64 shares a page with the one ending at 60\n")
    assert checks.news() == "segment at 64 shares a page with the one ending at 60"
    assert checks.news() is None
