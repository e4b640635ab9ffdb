"""What tests share: a real sglang server on the CPU, one at a time for each process that runs tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from klbench.core.columns import HelperColumns, HelperName
from klbench.engine.client import OnCall, ServerClient
from klbench.engine.server import Server
from klbench.engine.target import Demo, LaunchOptions
from klbench.zoo import Kind
from tests.troubles import is_named, named_tests

# sglang is thousands of modules in three processes: each start would compile all of them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A terminal's size, exported by whatever started the tests (readline does), is none of theirs.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)

# The same examples every time, and no limit that a busy machine would pass.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions and sockets of the test's own: `pytestmark = pytest.mark.usefixtures("places")`."""
    monkeypatch.setenv("KLBENCH_HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that tests/troubles.py names: `-m faults` runs them and those that carry the mark."""
    named = named_tests()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if is_named(f"{file}::{item.name}", named):
            item.add_marker("faults")


class RunningDemo:
    """A demo server that is up. `server()` gives a `Server` for the event loop of the test that calls it."""

    def __init__(self, started: Server) -> None:
        self._started = started

    @property
    def url(self) -> str:
        return self._started.url

    @property
    def control_dir(self) -> Path:
        assert self._started.control_dir is not None
        return self._started.control_dir

    @property
    def nonce(self) -> str:
        assert self._started.nonce is not None
        return self._started.nonce

    @property
    def alive(self) -> bool:
        return self._started.process is not None and self._started.process.alive

    def server(self, on_call: OnCall | None = None) -> Server:
        old = self._started
        return Server(
            url=old.url,
            client=ServerClient(old.url, on_call=on_call),
            facts=old.facts,
            info=old.info,
            plan=old.plan,
            process=old.process,
            launch_s=old.launch_s,
            ready_to_capture=old.ready_to_capture,
            presences=old.presences,
            notes=old.notes,
        )

    def run(
        self, helper: HelperName, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
    ) -> HelperColumns:
        """Runs one helper from a test that has no event loop."""

        async def once() -> HelperColumns:
            server = self.server()
            try:
                return await server.run_helper(helper, prompts, max_new_tokens=max_new_tokens)
            finally:
                await server.client.close()

        return asyncio.run(once())

    def kill(self) -> None:
        self._started.kill_now()


StartDemo = Callable[..., RunningDemo]


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDemo]:
    """`demo_server(kind, flags, fault, deterministic=True)`: that server, ready.

    The last one stays up until another is asked for, so tests that want the same should stand together.
    """
    running: dict[tuple[object, ...], RunningDemo] = {}

    def start(
        kind: Kind = "dense",
        flags: Sequence[str] = (),
        fault: str | None = None,
        *,
        deterministic: bool = True,
    ) -> RunningDemo:
        wanted = (kind, tuple(flags), fault, deterministic)
        if wanted in running and running[wanted].alive:
            return running[wanted]
        for other in running.values():
            other.kill()
        running.clear()
        options = LaunchOptions(arguments=tuple(flags), deterministic=deterministic, fault=fault)
        folder = tmp_path_factory.mktemp("demo-server")

        async def once() -> Server:
            server = await Server.start(Demo(kind), options, folder=folder, launch_timeout_s=1500)
            # Its connections belong to this event loop, which ends here.
            await server.client.close()
            return server

        running[wanted] = RunningDemo(asyncio.run(once()))
        return running[wanted]

    yield start
    for server in running.values():
        server.kill()
