"""When a server's own dumper is not even asked: what it would do to the server, or to its files."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from klbench.engine.capture_control import RequestIds
from klbench.engine.dump_process import KeptReader
from klbench.engine.facts import ServerFacts
from klbench.engine.path_map import SAME_PATHS
from klbench.errors import UndecidedError
from klbench.session import attached_dumper
from klbench.session.attached_dumper import dumper_side

FACTS = ServerFacts(model="m", cuda_graphs=False, dp_size=1)


class Asked(Exception):
    """The server's dumper was asked something."""


class Client:
    async def dumper(self, _method: str, _body: Any = None) -> None:
        raise Asked


async def side(**facts: Any) -> Any:
    server: Any = SimpleNamespace(
        facts=dataclasses.replace(FACTS, **facts),
        url="http://127.0.0.1:30000",
        client=Client(),
        paths=SAME_PATHS,
    )
    session: Any = None
    return await dumper_side(session, server, RequestIds("a1b2"), KeptReader)


async def test_an_eager_server_is_asked() -> None:
    with pytest.raises(Asked):
        await side()


@pytest.mark.parametrize("graphs", [True, None])
async def test_a_server_that_may_replay_graphs_is_left_alone(graphs: bool | None) -> None:
    assert await side(cuda_graphs=graphs) is None


async def test_replicas_that_would_write_the_same_names_are_refused() -> None:
    with pytest.raises(UndecidedError, match="data-parallel"):
        await side(dp_size=2)


async def test_a_machine_on_which_sglangs_dumper_would_hang_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached_dumper, "own_address", lambda: None)
    with pytest.raises(UndecidedError, match="would hang") as caught:
        await side()
    assert "/etc/hosts" in caught.value.next
