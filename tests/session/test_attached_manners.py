"""What is done to a server that is not ours: read-only it is never flushed, and what disturbs is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from klbench.cli.headless import Plan, execute
from klbench.errors import ExitCode, UndecidedError
from klbench.session.folder import SessionFolder
from klbench.session.reading import read_state
from klbench.session.request import Options, StartRequest, Target
from tests.session.fake_engine import Client, FakeBench, Server

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("places")]

READONLY = StartRequest(
    target=Target(kind="url", url="http://127.0.0.1:1"),
    options=Options(samples=3, max_new_tokens=6, readonly=True),
)


def run(tmp_path: Path, start: StartRequest, plan: Plan, **server: Any) -> tuple[int, dict[str, Any]]:
    place = tmp_path / "result.json"

    def make_work(session: Any) -> FakeBench:
        bench = FakeBench(session)
        bench.fake.owned = start.target.kind != "url"
        for name, value in server.items():
            setattr(bench.fake, name, value)
        return bench

    code = execute(start, plan, session=tmp_path / "session", json_place=str(place), make_work=make_work)
    return code, json.loads(place.read_text())


def warnings(tmp_path: Path) -> str:
    state = read_state(SessionFolder(tmp_path / "session"))
    return "\n".join(f"{trouble.what} · {trouble.next}" for trouble in state.troubles)


def test_a_read_only_run_never_flushes_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flush(_: Client) -> None:
        raise AssertionError("flushed")

    monkeypatch.setattr(Client, "flush", flush)
    code, document = run(tmp_path, READONLY, Plan("run"))
    assert code == ExitCode.DIVERGED
    assert document["helpers"]["match"]["tokens"] == 18
    assert document["helpers"]["prefill_cache_hit"]["hits"] == 3
    assert document["options"]["readonly"] is True


@pytest.mark.parametrize(
    "plan", [Plan("locate"), Plan("census"), Plan("experiment", experiments=("repeat",))]
)
def test_what_changes_the_server_is_refused_read_only(tmp_path: Path, plan: Plan) -> None:
    code, document = run(tmp_path, READONLY, plan)
    assert code == ExitCode.USAGE
    assert "read-only" in document["error"]["what"]
    assert "--readonly" in document["error"]["next"]


def test_that_progress_cannot_be_seen_is_said_once_and_not_for_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def helper(*_: Any, observe: Any, **__: Any) -> Any:
        observe.arm_unseen("generation", "its /v1/loads gives no answer")
        observe.arm_unseen("scoring", "its /v1/loads gives no answer")
        raise UndecidedError("this is all that the test wants")

    monkeypatch.setattr(Server, "run_helper", helper)
    start = StartRequest(target=Target(kind="demo", model="dense"), options=Options(samples=3))
    run(tmp_path, start, Plan("run"))
    state = read_state(SessionFolder(tmp_path / "session"))
    (said,) = [one for one in state.troubles if "cannot be seen" in one.what]
    assert (said.level, said.why) == (
        "note", "its /v1/loads gives no answer; seen first in the generation arm of match",
    )  # fmt: skip


def test_others_on_the_server_and_retracted_requests_are_said(tmp_path: Path) -> None:
    start = StartRequest(
        target=Target(kind="demo", model="dense"), options=Options(samples=3, max_new_tokens=6)
    )
    run(tmp_path, start, Plan("run"), foreign_requests=2, retracted_requests=(0, 2))
    said = warnings(tmp_path)
    assert "match: 2 requests of others ran on this server · run again" in said
    assert "2 requests were retracted and computed again: 0, 2 · use fewer --samples" in said
