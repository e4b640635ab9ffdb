"""The GPU list without a GPU: its commands are commands of klbench, and its calls make the whole list."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from klbench.cli import main
from tests.gpu import clean, probe
from tests.gpu.rows import CALLS, ROWS, Place
from tests.gpu.run import MOST_AT_ONCE, port_of

# Where Linux begins to hand out ports itself.
FIRST_EPHEMERAL_PORT = 32_768


class Parsed(Exception):
    """A program got as far as its work."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, port_of(3), {name: tmp_path / name for row in ROWS for name in row.models})


def commands() -> list[Any]:
    return [pytest.param(row, id=row.name) for row in ROWS]


@pytest.mark.parametrize("row", commands())
def test_each_command_of_a_row_is_understood(
    row: Any, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def keep(start: Any, *_: Any, **__: Any) -> int:
        begun.append(start.target)
        return 0

    async def stop(arguments: Any, *_: Any) -> None:
        begun.append(arguments)
        raise Parsed

    class Drive:
        def __init__(self, *_: Any, **__: Any) -> None:
            begun.append(None)
            raise Parsed

    monkeypatch.setattr("klbench.cli.headless.execute", keep)
    monkeypatch.setattr("klbench.session.selftest.drive.Drive", Drive)
    monkeypatch.setattr(clean, "check", stop)
    monkeypatch.setattr(probe, "probe", stop)
    for command in row.commands(place):
        assert command[:2] == ["python3", "-m"]
        program, *arguments = command[2:]
        monkeypatch.setattr("sys.argv", [program, *arguments])
        if program != "klbench":
            with pytest.raises(Parsed):
                {"tests.gpu.clean": clean, "tests.gpu.probe": probe}[program].main()
            assert begun[-1].flags[:2] == ["--mem-fraction-static", "0.6"]
        elif arguments[0] == "selftest":
            main(arguments)
            assert begun[-1] is None
        elif arguments[0] == "report":
            # Of a session that the row has not made here.
            assert main(arguments) == 2
            assert "no session" in capsys.readouterr().err
        else:
            assert main(arguments) == 0
            assert begun[-1].arguments[:2] == ("--mem-fraction-static", "0.6")
    assert begun


def test_the_calls_together_make_each_row_once() -> None:
    named = [name for call in CALLS for name in call]
    assert sorted(named) == sorted(row.name for row in ROWS)
    alone = {row.name for row in ROWS if row.alone}
    assert all(alone >= set(call) or not alone & set(call) for call in CALLS)


def test_servers_side_by_side_have_ports_of_their_own_below_the_systems() -> None:
    ports = [port_of(place) for place in range(MOST_AT_ONCE)]
    assert all(later - port > 1_000 for port, later in itertools.pairwise(ports))
    assert ports[-1] + 1_000 < FIRST_EPHEMERAL_PORT


def test_a_check_of_a_clean_server_is_on_disk_after_each_step() -> None:
    """What a call that is cut has measured is not lost, and does not read as finished."""
    writes: list[dict[str, Any]] = []

    class Made:
        def __init__(self) -> None:
            self.document = {"helpers": {name: {"status": "clean"} for name in clean.HELPERS}}

        async def step(self, *_: Any) -> None:
            writes.append({})

        helpers = capture = stock = step

        def write(self, *, finished: bool = False) -> None:
            writes[-1] = {"finished": finished}

    arguments = clean.arguments_of(["m", "--capture", "match", "--dumper", "--stock"])
    asyncio.run(clean.steps(Made(), arguments))  # type: ignore[arg-type]
    assert [write.get("finished") for write in writes] == [False, False, False, True]
