"""The guide follows the evidence: each step is done when its question has an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from klbench.core.diagnosis import diagnose
from klbench.core.guide import GLOSSARY, STEPS, GuideFacts, terms_in, where_we_are

sys.path.insert(0, str(Path(__file__).parent))
from situations import SERVER, Run, clean, from_offset, noise, results_of


def verdict_on(*differ: Any, **more: Any) -> dict[str, Any]:
    columns = Run().three(*differ)
    return diagnose(results_of(columns), {part.helper: part for part in columns}, SERVER, **more)


def now(facts: GuideFacts) -> str | None:
    steps = [item.step.code for item in where_we_are(facts) if item.state == "now"]
    assert len(steps) <= 1
    return steps[0] if steps else None


FINDING = {
    "kind": "state_restore", "kinds": ["state_restore"], "module": "model.layers.1.self_attn.attn",
    "grade": "confirmed", "latent": False, "evidence": [],
}  # fmt: skip


def test_nothing_known_begins_with_the_server() -> None:
    assert now(GuideFacts()) == "server"
    assert now(GuideFacts(server={"deterministic": False})) == "server"


def test_a_server_leads_to_the_helpers() -> None:
    assert now(GuideFacts(server=SERVER)) == "helpers"


def test_noise_everywhere_leads_to_condition_one() -> None:
    facts = GuideFacts(server=SERVER, verdict=verdict_on(noise(1e-3)))
    assert now(facts) == "condition_1"
    learned = {item.step.code: item.learned for item in where_we_are(facts)}
    assert "rows share its forward" in learned["condition_1"]


def test_clean_cold_requests_settle_condition_one_and_lead_to_condition_two() -> None:
    facts = GuideFacts(server=SERVER, verdict=verdict_on(clean, from_offset(0, 0.3)))
    assert now(facts) == "condition_2"
    states = {item.step.code: item for item in where_we_are(facts)}
    assert states["condition_1"].state == "done"
    assert "bit-equal" in states["condition_1"].learned


def test_a_confirmed_finding_leads_to_the_report() -> None:
    verdict = verdict_on(clean, from_offset(0, 0.3), findings=[FINDING])
    facts = GuideFacts(server=SERVER, verdict=verdict, findings=[FINDING], located=True)
    assert now(facts) == "report"
    states = {item.step.code: item for item in where_we_are(facts)}
    assert "self_attn.attn" in states["locate"].learned


def test_a_clean_run_needs_only_the_report() -> None:
    facts = GuideFacts(server=SERVER, verdict=verdict_on(clean))
    assert now(facts) == "report"
    assert {item.state for item in where_we_are(facts)} == {"done", "not_needed", "now"}
    assert where_we_are(facts)[-1].todo.startswith("write the report: it says what was compared")
    assert now(GuideFacts(server=SERVER, verdict=verdict_on(clean), reported=True)) is None


def test_a_helper_without_an_answer_keeps_the_helpers_open() -> None:
    columns = [Run().helper("match")]
    verdict = diagnose(results_of(columns, decode_cache_hit="error"), {"match": columns[0]}, SERVER)
    assert now(GuideFacts(server=SERVER, verdict=verdict)) == "helpers"


@pytest.mark.parametrize(
    "verdict", [{}, {"status": "found"}, {"status": "found", "hypotheses": [3], "evidence": "x"}]
)
def test_a_verdict_from_elsewhere_breaks_nothing(verdict: dict[str, Any]) -> None:
    assert len(where_we_are(GuideFacts(server=SERVER, verdict=verdict))) == len(STEPS)


def test_every_step_and_word_explains_itself() -> None:
    assert len({step.code for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert step.question.endswith("?")
        assert min(len(step.why), len(step.how)) > 40
        assert step.command.startswith("klbench ")
    assert all(len(meaning) > 15 for meaning in GLOSSARY.values())


def test_what_the_verdict_proposes_is_what_the_step_asks_for() -> None:
    verdict = verdict_on(clean, from_offset(0, 0.3))
    for facts, key in (
        (GuideFacts(server=SERVER, verdict=verdict), "o"),
        (GuideFacts(server=SERVER, verdict=verdict, located=True), "X"),  # it found no origin
    ):
        step = next(item for item in where_we_are(facts) if item.state == "now")
        proposed = next(item for item in verdict["next"] if (item["code"] == "locate") is (key == "o"))
        assert (step.step.code, step.key, step.todo) == ("condition_2", key, proposed["text"])
        assert step.command.startswith("klbench locate" if key == "o" else "klbench experiment")
    assert "longer prompt behind them" in step.todo


def test_what_cannot_be_made_here_is_not_asked_for() -> None:
    verdict = verdict_on(clean, from_offset(0, 0.3))
    for item in verdict["next"]:
        if item["code"] in ("locate", "wide_restore"):
            item["values"]["not_possible"] = "no"
    step = next(
        item
        for item in where_we_are(GuideFacts(server=SERVER, verdict=verdict))
        if item.step.code == "condition_2"
    )
    assert "longer prompt behind them" not in step.todo
    assert "locate" not in step.todo


def test_a_capture_under_way_is_waited_for_where_it_settles_a_condition() -> None:
    facts = GuideFacts(server=SERVER, verdict=verdict_on(clean, from_offset(0, 0.3)), doing="locate")
    step = next(item for item in where_we_are(facts) if item.state == "now")
    assert (step.step.code, step.todo) == ("condition_2", "wait: the arms are repeated and captured")


@pytest.mark.parametrize(
    ("doing", "code"), [("launch", "server"), ("run", "helpers"), ("locate", "locate"), ("report", "report")]
)
def test_what_is_under_way_is_waited_for(doing: str, code: str) -> None:
    states = {item.step.code: item for item in where_we_are(GuideFacts(doing=doing))}
    assert states[code].todo.startswith("wait: ")
    assert all(not item.todo.startswith("wait") for other, item in states.items() if other != code)


def test_a_step_passed_over_leads_to_the_next_and_can_be_taken_up_again() -> None:
    verdict = verdict_on(clean, from_offset(0, 0.3))
    assert now(GuideFacts(server=SERVER, verdict=verdict)) == "condition_2"
    assert now(GuideFacts(server=SERVER, verdict=verdict, skipped={"condition_2"})) == "locate"
    everything = {step.code for step in STEPS}
    assert now(GuideFacts(server=SERVER, verdict=verdict, skipped=everything)) is None
    states = where_we_are(GuideFacts(server=SERVER, verdict=verdict, skipped=everything))
    # What has its answer stays answered.
    assert {item.step.code for item in states if item.state == "done"} >= {"server", "helpers"}


def test_the_words_of_a_text_are_found_whole() -> None:
    assert set(terms_in("a wide extend behind it")) == {"wide extend"}
    assert "extend" in terms_in("an extend of few rows")
    assert "M" not in terms_in("a mean of many")
    assert "M" in terms_in("the M where it changes")
    # Everyday words are explained in the list of all, and not wherever they occur.
    assert set(terms_in("run the helper once more, each request on its own server")) == {"helper"}


def test_the_short_reason_of_a_step_fits_a_line_and_the_words_it_uses_are_explained() -> None:
    for step in STEPS:
        assert len(step.short) <= 80
        assert step.code == "report" or terms_in(f"{step.why} {step.how} {step.question}")
