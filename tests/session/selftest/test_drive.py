"""The plan is worked off once, whatever happens in between."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from klbench.errors import ServerError
from klbench.session.selftest import drive
from klbench.session.selftest.document import Document, key_of
from klbench.session.selftest.drive import Drive
from klbench.session.selftest.plan import Asked, Case, Station, Workload, make_plan, size


class ScriptedLab:
    """Stands for a live server: it answers right, and does at one fault what the script says."""

    script: dict[str, list[BaseException]]
    started: list[str]
    stopped: int

    def __init__(self, model: str, configuration: Any, **_: Any) -> None:
        self.model, self.configuration = model, configuration
        self.facts = {"sglang_version": "0.5.23", "torch": "2.0", "device": "cpu"}

    async def __aenter__(self) -> "ScriptedLab":
        type(self).started.append(f"{self.model} {self.configuration.name}")
        return self

    async def __aexit__(self, *_: Any) -> None:
        type(self).stopped += 1

    async def case(self, case: Case) -> dict[str, Any]:
        if errors := type(self).script.get(case.fault):
            error = errors.pop(0)
            if isinstance(error, TimeoutError):
                await asyncio.Event().wait()
            raise error
        judged = {"family": case.family, "grade": "confirmed", "marks": {"condition": "right"}}
        return self._entry(case.workload, case.fault) | judged

    async def clean(self, workload: Workload) -> dict[str, Any]:
        return self._entry(workload, "none")

    def _entry(self, workload: Workload, fault: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "configuration": self.configuration.name,
            "workload": workload.name,
            "fault": fault,
            "answer": "right",
            "why": "",
            "elapsed_s": 1.0,
        }


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLab]:
    ScriptedLab.script, ScriptedLab.started, ScriptedLab.stopped = {}, [], 0
    monkeypatch.setattr(drive, "Lab", ScriptedLab)
    return ScriptedLab


def driven(asked: Asked, place: Path) -> tuple[Document, Drive, list[str], list[Station]]:
    stations = make_plan(asked)
    document = Document(asked, stations, place)
    said: list[str] = []
    found = Drive(stations, document, folder=place.parent, new_tokens=24, say=said.append)
    return document, found, said, stations


def test_everything_is_done_on_one_server_for_each_station(tmp_path: Path, lab: type[ScriptedLab]) -> None:
    document, found, said, stations = driven(Asked("full"), tmp_path / "s.json")
    asyncio.run(found.run())
    assert len(document.done) == size(stations)
    assert len(lab.started) == len(stations) == lab.stopped
    assert said[-1].startswith(f"[{size(stations)}/{size(stations)}]")


def test_a_defect_in_one_case_is_its_result(tmp_path: Path, lab: type[ScriptedLab]) -> None:
    lab.script = {"key-write": [ValueError("no such thing")]}
    document, found, _, _ = driven(Asked(faults=("key-write", "restore-key")), tmp_path / "s.json")
    asyncio.run(found.run())
    first, second = document.as_dict()["cases"]
    assert (first["answer"], second["answer"]) == ("error", "right")
    assert "ValueError: no such thing" in first["why"]
    assert len(lab.started) == 1


def test_a_server_that_dies_costs_one_case_and_is_started_again(
    tmp_path: Path, lab: type[ScriptedLab]
) -> None:
    lab.script = {"key-write": [ServerError("the server died", why="killed")]}
    document, found, _, _ = driven(Asked(faults=("key-write", "restore-key")), tmp_path / "s.json")
    asyncio.run(found.run())
    assert [case["answer"] for case in document.as_dict()["cases"]] == ["error", "right"]
    assert len(lab.started) == lab.stopped == 2


def test_a_server_that_hangs_costs_one_case_and_is_started_again(
    tmp_path: Path, lab: type[ScriptedLab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "_CASE_LIMIT_S", 0.0)
    lab.script = {"key-write": [TimeoutError()]}
    document, found, said, _ = driven(Asked(faults=("key-write", "restore-key")), tmp_path / "s.json")
    asyncio.run(found.run())
    cases = document.as_dict()["cases"]
    assert [case["answer"] for case in cases] == ["error", "right"]
    assert "the server hangs" in cases[0]["why"]
    assert any("the server hangs" in line for line in said)
    assert len(lab.started) == lab.stopped == 2


def test_a_server_that_never_starts_is_given_up(
    tmp_path: Path, lab: type[ScriptedLab], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: ScriptedLab) -> ScriptedLab:
        raise ServerError("the server ended while it started", why="out of memory")

    monkeypatch.setattr(lab, "__aenter__", refused)
    document, found, _, stations = driven(Asked(faults=("key-write", "restore-key")), tmp_path / "s.json")
    asyncio.run(found.run())
    cases = document.as_dict()["cases"]
    assert len(cases) == size(stations)
    assert all("out of memory" in case["why"] and case["answer"] == "error" for case in cases)


def test_an_interrupted_selftest_is_taken_up_where_it_was(tmp_path: Path, lab: type[ScriptedLab]) -> None:
    asked, place = Asked(faults=("key-write", "restore-key", "value-write")), tmp_path / "s.json"
    lab.script = {"restore-key": [asyncio.CancelledError()]}
    document, found, _, _ = driven(asked, place)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(found.run())
    assert len(document.done) == 1
    assert lab.stopped == 1
    document, found, _, _ = driven(asked, place)
    assert document.taken_up == 1
    asyncio.run(found.run())
    faults = [key_of(case)[-1] for case in document.as_dict()["cases"]]
    assert faults == ["key-write", "restore-key", "value-write"]
