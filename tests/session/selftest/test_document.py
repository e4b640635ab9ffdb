"""The results of a selftest on disk: whole after each case, taken up only by the same selftest."""

import json
from pathlib import Path
from typing import Any

import pytest

from klbench.core.accuracy import MARKS
from klbench.errors import KlbenchError
from klbench.session.selftest import document as module
from klbench.session.selftest.document import Document, exit_code
from klbench.session.selftest.plan import Asked, Station, make_plan

ASKED = Asked(faults=("key-write", "restore-key"))


def entry(fault: str, answer: str = "right", **changed: Any) -> dict[str, Any]:
    return {
        "model": "dense",
        "configuration": "as it is",
        "workload": "4 prompts",
        "fault": fault,
        "family": "state",
        "answer": answer,
        "marks": dict.fromkeys(MARKS, "right" if answer == "right" else "wrong"),
        "why": "",
        "grade": "confirmed",
        "elapsed_s": 1.0,
        **changed,
    }


@pytest.fixture
def stations() -> list[Station]:
    return make_plan(ASKED)


def test_each_result_is_on_disk_and_taken_up(tmp_path: Path, stations: list[Station]) -> None:
    place = tmp_path / "selftest.json"
    Document(ASKED, stations, place).add(entry("key-write"), clean=False)
    assert json.loads(place.read_text())["summary"]["answers"]["right"] == 1
    again = Document(ASKED, stations, place)
    assert again.taken_up == 1
    assert again.done == {("dense", "as it is", "4 prompts", "key-write")}
    again.add(entry("restore-key"), clean=False)
    assert len(json.loads(place.read_text())["cases"]) == 2


def test_an_error_is_tried_again(tmp_path: Path, stations: list[Station]) -> None:
    place = tmp_path / "selftest.json"
    Document(ASKED, stations, place).add(entry("key-write", "error"), clean=False)
    assert Document(ASKED, stations, place).done == set()


def test_a_finished_selftest_is_made_anew(tmp_path: Path, stations: list[Station]) -> None:
    place = tmp_path / "selftest.json"
    document = Document(ASKED, stations, place)
    for fault in ("key-write", "restore-key"):
        document.add(entry(fault), clean=False)
    assert Document(ASKED, stations, place).taken_up == 0


def test_other_options_or_other_code_take_nothing_up(
    tmp_path: Path, stations: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "selftest.json"
    Document(ASKED, stations, place).add(entry("key-write"), clean=False)
    other = Asked(faults=("key-write", "restore-key"), new_tokens=48)
    assert Document(other, make_plan(other), place).taken_up == 0
    monkeypatch.setattr(module, "code_sha256", lambda: "other code")
    assert Document(ASKED, stations, place).taken_up == 0


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b'{"schema": "klbench.run/1"}'])
def test_a_file_that_is_no_selftest_is_not_taken_up(
    tmp_path: Path, stations: list[Station], content: bytes
) -> None:
    place = tmp_path / "selftest.json"
    place.write_bytes(content)
    assert Document(ASKED, stations, place).taken_up == 0


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path, stations: list[Station]) -> None:
    document = Document(ASKED, stations, tmp_path / "missing" / "selftest.json")
    with pytest.raises(KlbenchError, match="cannot write"):
        document.add(entry("key-write"), clean=False)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (["right", "right"], 0),
        (["right"], 5),
        (["right", "undecided"], 5),
        (["right", "did_not_fire"], 5),
        (["right", "error"], 5),
        (["right", "wrong"], 1),
        (["wrong", "undecided"], 1),
    ],
)
def test_the_exit_code(stations: list[Station], answers: list[str], code: int) -> None:
    document = Document(ASKED, stations, None)
    for fault, answer in zip(("key-write", "restore-key"), answers, strict=False):
        document.add(entry(fault, answer), clean=False)
    assert exit_code(document.as_dict()) == code


def test_a_fault_that_cannot_fire_and_did_not_leaves_nothing_open(stations: list[Station]) -> None:
    document = Document(ASKED, stations, None)
    document.add(entry("key-write"), clean=False)
    document.add(entry("restore-key", "did_not_fire", cannot_fire=True), clean=False)
    assert exit_code(document.as_dict()) == 0


@pytest.mark.parametrize(("answer", "code"), [("right", 0), ("wrong", 1), ("error", 5)])
def test_a_false_accusation_is_wrong_and_a_clean_server_without_answer_is_open(
    answer: str, code: int
) -> None:
    asked = Asked()
    stations = make_plan(asked)
    document = Document(asked, stations, None)
    (station,) = stations
    for case in station.cases:
        document.add(entry(case.fault), clean=False)
    for workload in station.clean:
        document.add(entry("none", workload=workload.name), clean=True)
    content = document.as_dict()
    assert exit_code(content) == 0
    document = Document(asked, stations, None)
    for case in station.cases:
        document.add(entry(case.fault), clean=False)
    for workload in station.clean:
        document.add(entry("none", answer, workload=workload.name), clean=True)
    assert exit_code(document.as_dict()) == code
