"""A divergence that lives only with CUDA graphs: which servers are started, and what is looked at on them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.core.experiments import configurations
from klbench.engine.dump_process import DumpProcess
from klbench.errors import UndecidedError, UsageError
from klbench.session import bench as benches
from klbench.session import events as ev
from klbench.session.bench import Bench
from klbench.session.locating import Chosen

GRAPHS, EAGER = False, True


class OneServer(Bench):
    """A session whose server replays graphs or was started eager; `survives`: whether it diverges eager."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, owned: bool, survives: bool, eager: bool = False
    ) -> None:
        self.said: list[ev.Event] = []
        self.started: list[bool] = []
        self.located: list[tuple[bool, str]] = []
        self._survives = survives
        self._owned = owned
        options = SimpleNamespace(
            yes_flush=True,
            readonly=False,
            backend=None,
            server_python=None,
            ready_to_capture=eager,
            max_new_tokens=8,
        )
        state = SimpleNamespace(server=SimpleNamespace(launch_s=1.0))
        super().__init__(
            SimpleNamespace(
                start=SimpleNamespace(options=options, target=SimpleNamespace(kind="launch")),
                state=state,
                emit=self.said.append,
            )  # type: ignore[arg-type]
        )
        self.current: Any = self._start_one(GRAPHS)
        self._measured[1, "match"] = (1, "columns")  # type: ignore[assignment]
        monkeypatch.setattr(benches, "choose", self._choose)
        monkeypatch.setattr(benches, "Measurement", self._measurement)
        monkeypatch.setattr(benches, "server_side", lambda server, _ids, _dumps: server)
        monkeypatch.setattr(benches, "dump_process", self._no_reader)
        monkeypatch.setattr(benches, "trace_and_locate", self._locate)
        monkeypatch.setattr(benches, "judge_again", lambda _session: None)

    def _start_one(self, eager: bool) -> Any:
        self.started.append(eager)
        return SimpleNamespace(
            owned=self._owned,
            ready_to_capture=eager,
            control_dir=Path("/control"),
            nonce="a1b2",
            facts=SimpleNamespace(
                pp_size=1, nnodes=1, context_length=None, vocab_size=None, chunked_prefill_size=None
            ),
            check_comparable=lambda: None,
            launch_s=1.0,
        )

    async def _ready_server(self, _job: Any) -> Any:
        return self.current

    async def _start(self, _job: Any, ready_to_capture: bool) -> Any:
        self.current = self._start_one(ready_to_capture)
        return self.current

    async def close(self) -> None:
        self._measured.clear()

    async def _prompts_for(self, _server: Any) -> Any:
        return SimpleNamespace(as_lists=list, prompts=[])

    async def _no_reader(self, *_: Any) -> DumpProcess:
        return DumpProcess(Path("/nowhere/python"), {})

    def _diverges(self) -> bool:
        return self._survives or not self.current.ready_to_capture

    def _choose(self, *_: Any) -> Chosen:
        if not self._diverges():
            raise UsageError("no helper diverged", why="match clean")
        return Chosen(len(self.started), "match", 0)

    def _measurement(self, *_: Any) -> Any:
        async def execute(_job: Any) -> None:
            pass

        number = len(self.started)
        return SimpleNamespace(execute=execute, number=number, measured={(number, "match"): (1, "columns")})

    async def _locate(self, _session: Any, _job: Any, side: Any, backend: str, *_: Any) -> None:
        self.located.append((side.ready_to_capture, backend))


async def test_what_survives_eager_execution_is_located_there(monkeypatch: pytest.MonkeyPatch) -> None:
    session = OneServer(monkeypatch, owned=True, survives=True)

    await session.locate(None, None, None, relaunch=True)  # type: ignore[arg-type]

    assert session.started == [GRAPHS, EAGER]
    assert session.located == [(EAGER, "digest")]


async def test_what_goes_away_eager_is_looked_for_in_the_state_of_the_server_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = OneServer(monkeypatch, owned=True, survives=False)

    await session.locate(None, None, None, relaunch=True)  # type: ignore[arg-type]

    assert session.started == [GRAPHS, EAGER, GRAPHS]
    assert session.located == [(GRAPHS, "state")]
    said = [event.what for event in session.said if isinstance(event, ev.Trouble)]
    assert any("does not show on the server as it runs now" in what for what in said)


async def test_a_server_of_ours_is_not_started_again_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    session = OneServer(monkeypatch, owned=True, survives=True)

    with pytest.raises(UndecidedError, match="cannot be captured as it runs"):
        await session.locate(None, None, None, relaunch=False)  # type: ignore[arg-type]

    assert session.started == [GRAPHS]


async def test_an_attached_server_with_graphs_is_looked_at_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    session = OneServer(monkeypatch, owned=False, survives=True)

    await session.locate(None, None, None, relaunch=False)  # type: ignore[arg-type]

    assert session.started == [GRAPHS]
    assert session.located == [(GRAPHS, "state")]


async def test_the_experiment_starts_an_eager_session_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = OneServer(monkeypatch, owned=True, survives=True, eager=True)
    session.started.clear()

    (graphs_on,) = configurations("graphs", {"device": "cuda", "cuda_graphs": False})
    await session._reconfigure(None, graphs_on)  # type: ignore[arg-type]
    (overlap,) = configurations("overlap", {"device": "cuda", "overlap": True})
    await session._reconfigure(None, overlap)  # type: ignore[arg-type]

    assert session.started == [GRAPHS, EAGER]
