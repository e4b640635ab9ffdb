"""The quick selftest on the real server: every family answered rightly, clean servers left alone."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from klbench.cli import main

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def selftest() -> Iterator[tuple[int, dict[str, Any]]]:
    """The exit code and the document of `klbench selftest --quick`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "selftest.json"
        code = main(["selftest", "--quick", "--json", str(place)])
        yield code, json.loads(place.read_text())


def test_every_answer_is_right(selftest: tuple[int, dict[str, Any]]) -> None:
    code, document = selftest
    answers = {case["fault"]: case["answer"] for case in document["cases"]}
    # It cannot fire, and that is never called right.
    assert answers.pop("o_proj-rows:rows=1000000") == "did_not_fire"
    why = {case["fault"]: case["why"] for case in document["cases"]}
    assert {fault: why[fault] for fault, answer in answers.items() if answer != "right"} == {}
    assert len(document["cases"]) + len(document["clean"]) == document["planned"]
    assert code == 0


def test_faults_fire_carry_their_proof_and_leave_no_trace(selftest: tuple[int, dict[str, Any]]) -> None:
    for case in selftest[1]["cases"]:
        count = min(entry["count"] for entry in case["fired"])
        assert (count == 0) == (case["fault"] == "o_proj-rows:rows=1000000")
        assert case["clean_again"]
        assert all(entry["first_positions"] for entry in case["fired"] if entry["count"])


def test_conditions_are_confirmed_where_they_are_certain(selftest: tuple[int, dict[str, Any]]) -> None:
    probable = [case["fault"] for case in selftest[1]["cases"] if case["grade"] != "confirmed"]
    # It changes nothing, so nothing is there to be confirmed.
    assert probable == ["o_proj-rows:rows=1000000"]


def test_clean_servers_are_not_accused(selftest: tuple[int, dict[str, Any]]) -> None:
    for entry in selftest[1]["clean"]:
        assert entry["answer"] == "right", entry["why"]
        assert entry["helpers"]["match"]["tokens"] > 0
