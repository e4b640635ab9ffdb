"""The confusion table counts what was asked and nothing else."""

from typing import Any

import pytest

from klbench.core.accuracy import MARKS
from klbench.core.accuracy_table import NAMES, combined, markdown, not_right, rows, summary, without_rule
from tests.tools.readme import replaced


def case(fault: str, answer: str = "right", **changed: Any) -> dict[str, Any]:
    return {
        "model": "dense",
        "configuration": "as it is",
        "workload": "4 prompts",
        "fault": fault,
        "family": "state",
        "answer": answer,
        "marks": dict.fromkeys(MARKS, "right"),
        "why": "",
        "grade": "confirmed",
        "deciding": [],
        **changed,
    }


CASES = [
    case("key-write"),
    case("restore-key", model="moe", grade="probable"),
    case(
        "attention-blocks",
        "wrong",
        model="moe",
        marks=dict.fromkeys(MARKS, "right") | {"condition": "wrong"},
        why="the condition is said to be race",
    ),
    case(
        "race", "undecided", marks=dict.fromkeys(MARKS, "right") | {"kind": "undecided"}, deciding=["repeats"]
    ),
    case("o_proj-rows:rows=9", "did_not_fire", marks=dict.fromkeys(MARKS, "none")),
]
CLEAN = [case("none", marks={}), case("none", "wrong", marks={}, workload="1 prompt", why="accused: match")]


def test_a_row_counts_right_ones_of_those_that_were_asked() -> None:
    dense, moe, every = (dict(zip(("model", *NAMES), row, strict=True)) for row in rows(CASES, "model"))
    assert dense["cases"] == "3"
    assert (dense["condition"], dense["kind"], dense["confirmed"]) == ("2/2", "1/2", "2/2")
    assert (dense["undecided"], dense["did not fire"], dense["wrong or error"]) == ("1", "1", "0")
    assert (moe["condition"], moe["confirmed"], moe["wrong or error"]) == ("1/2", "0/2", "1")
    assert (every["cases"], every["condition"], every["layer"]) == ("5", "3/4", "4/4")


def test_what_was_not_asked_at_all_shows_no_number() -> None:
    (only,) = rows([CASES[4]], "model")
    assert only[1:4] == ["1", "–", "–"]


def test_the_summary_counts_answers_and_false_accusations() -> None:
    counted = summary(CASES, CLEAN)
    assert counted["answers"] == {"right": 2, "undecided": 1, "did_not_fire": 1, "wrong": 1, "error": 0}
    assert (counted["clean_configurations"], counted["false_accusations"]) == (2, 1)
    assert counted["marks"]["condition"] == {"right": 3, "undecided": 0, "wrong": 1, "no_rule": 0}


def test_a_case_without_a_rule_for_a_mark_is_not_counted_there_and_named() -> None:
    unruled = [
        case("race:odds=8", marks=dict.fromkeys(MARKS, "right") | {"position": "no_rule"}),
        case("lm_head-rows", marks=dict.fromkeys(MARKS, "right") | {"layer": "no_rule"}),
        case("race:odds=2", marks=dict.fromkeys(MARKS, "right") | {"position": "no_rule"}),
    ]
    (row,) = (dict(zip(("model", *NAMES), row, strict=True)) for row in rows([*unruled, CASES[0]], "model"))
    assert (row["cases"], row["position"], row["layer"], row["kind"]) == ("4", "2/2", "3/3", "4/4")
    assert without_rule([*unruled, CASES[0]]) == ["layer: 1 case (lm_head-rows)", "position: 2 cases (race)"]
    assert without_rule(CASES) == []
    assert summary(unruled, [])["marks"]["position"] == {"right": 1, "undecided": 0, "wrong": 0, "no_rule": 2}


def test_a_fault_that_cannot_fire_is_said_not_to_have_fired_and_is_nothing_to_mend() -> None:
    cannot = case("o_proj-rows:rows=9", "did_not_fire", cannot_fire=True, marks=dict.fromkeys(MARKS, "none"))
    counted = summary([cannot, *CASES], [])
    assert (counted["answers"]["did_not_fire"], counted["could_not_fire"]) == (2, 1)
    assert not_right([cannot], []) == []
    assert len(not_right([cannot | {"cannot_fire": False}], [])) == 1


def test_every_case_that_is_not_right_is_named_with_its_reason() -> None:
    lines = not_right(CASES, CLEAN)
    assert len(lines) == 4
    assert "moe · as it is · 4 prompts · attention-blocks: wrong: the condition" in lines[0]
    assert "would decide it: repeats" in lines[1]
    assert "accused: match" in lines[3]


def test_selftests_of_one_model_each_are_taken_together_where_the_code_is_the_same() -> None:
    made = {"date": "2026-11-29", "machine": "x86_64"}
    one = {"code_sha256": "a", "made": made, "planned": 3, "elapsed_s": 60.0, "cases": CASES, "clean": CLEAN}
    other = one | {"made": made | {"date": "2026-11-30"}, "cases": CASES[:1], "clean": []}
    whole = combined([one, other])
    assert (whole["planned"], whole["elapsed_s"], len(whole["cases"])) == (6, 120.0, len(CASES) + 1)
    assert whole["made"]["date"] == "2026-11-29 to 2026-11-30"
    assert combined([one])["made"] == made
    with pytest.raises(ValueError, match="different code"):
        combined([one, other | {"code_sha256": "b"}])
    with pytest.raises(ValueError, match="different machines"):
        combined([one, other | {"made": made | {"machine": "arm64"}}])


def test_the_readme_says_when_where_and_with_what_it_was_measured() -> None:
    document = {
        "options": {"extent": "full"},
        "made": {
            "date": "2026-11-30",
            "klbench_version": "0.1.0",
            "sglang_version": "0.5.23",
            "torch": "2.9",
            "machine": "x86_64, 2 cores",
        },
        "elapsed_s": 3000.0,
        "planned": 7,
        "cases": CASES,
        "clean": CLEAN,
    }
    text = "\n".join(markdown(document))
    for words in (
        "2026-11-30",
        "sglang 0.5.23",
        "x86_64, 2 cores",
        "5 cases of 5 faults on 2 models",
        "50 minutes",
    ):
        assert words in text
    assert "1 false accusations" in text
    assert "ended early" not in text
    assert "ended early, with 7 of 9 results" in "\n".join(markdown(document | {"planned": 9}))
    assert text.count("| all |") == 1
    assert "cannot fire" not in text
    assert "Not counted" not in text
    unruled = case("race", marks=dict.fromkeys(MARKS, "right") | {"position": "no_rule"})
    text = "\n".join(markdown(document | {"cases": [*CASES, unruled]}))
    assert "any answer would do: position: 1 case (race)." in text
    unable = case("o_proj-rows:rows=1000000", "did_not_fire", cannot_fire=True, marks={})
    text = "\n".join(markdown(document | {"cases": [*CASES, unable]}))
    assert "Planted where they cannot fire, and said not to have fired: 1." in text
    assert "6 cases of 5 faults" in text
    readme = replaced("before\n<!-- selftest -->\nold\n<!-- /selftest -->\nafter\n", "selftest", ["new"])
    assert readme == "before\n<!-- selftest -->\nnew\n<!-- /selftest -->\nafter\n"
