"""`klbench selftest` from the outside: what it refuses, prints, writes and returns."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from klbench.cli import main
from klbench.session.selftest import drive
from tests.session.selftest.test_drive import ScriptedLab

FAULTS = ["--fault", "key-write", "--fault", "restore-key"]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLab]:
    ScriptedLab.script, ScriptedLab.started, ScriptedLab.stopped = {}, [], 0
    monkeypatch.setattr(drive, "Lab", ScriptedLab)
    return ScriptedLab


@pytest.mark.usefixtures("lab")
def test_all_right_prints_the_table_and_returns_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *FAULTS]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:3] == ["dense", "2", "2/2"]
    assert "[1/2] dense · as it is · 4 prompts · key-write · right, condition confirmed" in err


@pytest.mark.usefixtures("lab")
def test_json_on_stdout_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *FAULTS, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "klbench.selftest/1"
    assert [case["fault"] for case in document["cases"]] == ["key-write", "restore-key"]
    assert document["made"]["sglang_version"] == "0.5.23"


def test_a_defect_is_a_missing_answer(lab: type[ScriptedLab], tmp_path: Path) -> None:
    lab.script = {"key-write": [ValueError("broken")]}
    assert main(["selftest", *FAULTS, "--json", str(tmp_path / "s.json")]) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "none-such"],
        ["--family", "weather"],
        ["--model", "huge"],
        ["--fault", "key-write:layer=x"],
    ],
)
def test_what_there_is_not_is_a_usage_error(arguments: list[str], lab: type[ScriptedLab]) -> None:
    assert main(["selftest", *arguments]) == 2
    assert lab.started == []


def test_ctrl_c_keeps_what_there_is_and_the_same_command_takes_it_up(
    lab: type[ScriptedLab],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "s.json"
    plain = ScriptedLab.case

    async def interrupted(self: ScriptedLab, case: Any) -> dict[str, Any]:
        if case.fault == "restore-key":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        return await plain(self, case)

    monkeypatch.setattr(ScriptedLab, "case", interrupted)
    assert main(["selftest", *FAULTS, "--json", str(place)]) == 130
    assert lab.stopped == 1
    assert [case["fault"] for case in json.loads(place.read_text())["cases"]] == ["key-write"]
    assert "1 of 2 were done" in capsys.readouterr().out
    monkeypatch.setattr(ScriptedLab, "case", plain)
    assert main(["selftest", *FAULTS, "--json", str(place)]) == 0
    document = json.loads(place.read_text())
    assert [case["fault"] for case in document["cases"]] == ["key-write", "restore-key"]
    assert "error" not in document
    assert "taken over" in capsys.readouterr().err
