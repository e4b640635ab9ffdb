"""Nothing is computed or flushed on a server that is not ours before its user agreed, by whichever job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.engine.leave import Leave
from klbench.errors import UsageError
from klbench.session import bench as benches
from klbench.session import serving
from klbench.session.folder import make_session
from klbench.session.request import Options, StartRequest, Target
from klbench.session.runner import Runner
from klbench.session.serving import Serving
from tests.session.fake_engine import Client, FakeBench

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("places")]

URL = "http://127.0.0.1:1"


class Guarded(Client):
    """Answers as the server does, and what is not allowed fails as with the real client."""

    def __init__(self) -> None:
        super().__init__(None)
        self.leave = Leave.ASK
        self.done: list[str] = []

    async def load(self) -> None:
        return None

    async def flush(self) -> None:
        self.leave.check(Leave.FLUSH, "a flush")
        self.done.append("flush")
        await super().flush()

    async def generate(self, input_ids: Any, **how: Any) -> Any:
        self.leave.check(Leave.COMPUTE, "a request")
        self.done.append("generate")
        return await super().generate(input_ids, **how)


class Attached(FakeBench):
    """The bench on a server that is not ours and carries our plugin."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.client = self.fake.client = Guarded()
        self.client.leave = self._leave
        self.fake.owned, self.fake.url = False, URL

    async def _side(self, *_: Any) -> Any:
        return self.fake, self.fake, "digest"

    async def _side_of(self, _server: Any) -> Any:
        return self.fake

    async def _capturing_server(self, *_: Any) -> Any:
        return self.fake


class User:
    """The job's user; `agrees` or is not there."""

    number = 1

    def __init__(self, agrees: bool) -> None:
        self.agrees = agrees
        self.asked: list[str] = []

    def progress(self, *_: Any) -> None: ...

    async def ask(self, what: str, _why: str, **_: Any) -> None:
        self.asked.append(what)
        if not self.agrees:
            raise UsageError("nobody agreed")


JOBS: dict[str, Callable[[Attached, User], Awaitable[None]]] = {
    "run": lambda bench, user: bench.run(user, ()),
    "continue": lambda bench, user: bench.resume(user),
    "locate": lambda bench, user: bench.locate(user, None, None, False),
    "census": lambda bench, user: bench.census(user, False),
    "replay": lambda bench, user: bench.replay(user, None, 0),
    "experiment": lambda bench, user: bench.experiment(user, ("repeats",), None, None),
}


@pytest.fixture(autouse=True)
def short_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the question is short: locating and experiments flush, all of them compute."""

    async def computes(_session: Any, _job: Any, server: Any, *_: Any, **__: Any) -> None:
        await server.client.generate([[1]], max_new_tokens=1, rids=["klb-fade-1g-0"])

    async def flushes(session: Any, job: Any, server: Any, *_: Any, **__: Any) -> None:
        await server.client.flush()
        await computes(session, job, server)

    monkeypatch.setattr(benches, "trace_and_locate", flushes)
    monkeypatch.setattr(benches, "make_experiments", flushes)
    monkeypatch.setattr(benches, "census", computes)
    monkeypatch.setattr(benches, "replay_finding", computes)
    for name in ("located_to_replay", "finding_of", "check_can_replay"):
        monkeypatch.setattr(benches, name, lambda *_: None)
    monkeypatch.setattr(
        benches,
        "interrupted",
        lambda state: SimpleNamespace(run=state.run, left=("match",)),
    )


@asynccontextmanager
async def opened(tmp_path: Path, **options: Any) -> AsyncIterator[Attached]:
    """The work of a session in which an earlier runner has recorded a divergence."""
    start = StartRequest(
        target=Target(kind="url", url=URL), options=Options(samples=3, max_new_tokens=6, **options)
    )
    shown = start.as_shown()
    folder = make_session(tmp_path / "session", *shown)
    made: list[Attached] = []

    def make_work(session: Any) -> Attached:
        made.append(Attached(session))
        return made[-1]

    async with Runner(folder, start, make_work, attended=True):
        made[-1]._leave = made[-1].client.leave = Leave.FLUSH
        await JOBS["run"](made[-1], User(agrees=False))
    async with Runner(folder, start, make_work, attended=True):
        yield made[-1]


@pytest.mark.parametrize("job", JOBS)
async def test_whichever_job_is_first_asks_and_does_nothing_before(tmp_path: Path, job: str) -> None:
    async with opened(tmp_path) as bench:
        user = User(agrees=False)
        with pytest.raises(UsageError, match="nobody agreed"):
            await JOBS[job](bench, user)
        assert len(user.asked) == 1
        assert URL in user.asked[0]
        assert bench.client.done == []


@pytest.mark.parametrize("job", JOBS)
async def test_what_was_agreed_to_is_done_and_not_asked_again(tmp_path: Path, job: str) -> None:
    async with opened(tmp_path) as bench:
        user = User(agrees=True)
        await JOBS[job](bench, user)
        await JOBS[job](bench, user)
        assert len(user.asked) == 1
        assert "generate" in bench.client.done
        assert ("flush" in user.asked[0]) == ("flush" in bench.client.done)


async def test_leave_to_compute_is_no_leave_to_flush(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        user = User(agrees=True)
        await JOBS["census"](bench, user)
        await JOBS["run"](bench, user)
        assert [("flush" in what) for what in user.asked] == [False, True]


@pytest.mark.parametrize(("job", "flushes"), [("run", 6), ("locate", 8), ("experiment", 12)])
async def test_a_job_says_all_that_it_does(tmp_path: Path, job: str, flushes: int) -> None:
    async with opened(tmp_path) as bench:
        user = User(agrees=True)
        await JOBS[job](bench, user)
    assert f"flush the cache of http://127.0.0.1:1 about {flushes} times" in user.asked[0]


async def test_with_yes_flush_nobody_is_asked(tmp_path: Path) -> None:
    async with opened(tmp_path, yes_flush=True) as bench:
        user = User(agrees=False)
        for job in JOBS.values():
            await job(bench, user)
        assert user.asked == []


@pytest.mark.parametrize(
    ("options", "leave", "may_ask", "asked"),
    [
        ({}, Leave.ASK, True, ["send 3 requests of one token to http://127.0.0.1:1"]),
        ({"yes_flush": True}, Leave.FLUSH, True, []),
        ({"readonly": True}, Leave.COMPUTE, False, []),
        ({"readonly": True, "yes_flush": True}, Leave.COMPUTE, False, []),
    ],
)
async def test_attaching_computes_nothing_that_was_not_agreed_to(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], leave: Leave, may_ask: bool, asked: list[str]
) -> None:
    user, answers = User(agrees=True), []
    facts = SimpleNamespace(as_dict=dict, git_commit=None, sglang_path=None)
    server = SimpleNamespace(
        client=SimpleNamespace(leave=None), facts=facts, url=URL, launch_s=0.0, differs=[], notes=(),
        owned=False,
    )  # fmt: skip

    async def attach(_url: str, *, agree: Any, **_: Any) -> Any:
        answers.append(await agree(3))
        return server

    monkeypatch.setattr(serving.Server, "attach", attach)
    start = StartRequest(target=Target(kind="url", url=URL), options=Options(**options))
    session: Any = SimpleNamespace(start=start, emit=lambda _event: None)
    await Serving(session)._start(user, False)  # type: ignore[arg-type]
    assert server.client.leave is leave
    assert answers == [may_ask]
    assert user.asked == asked
