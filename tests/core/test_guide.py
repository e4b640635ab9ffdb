"""The guide follows the evidence: each step is done when its question has an answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from klbench.core.diagnosis import diagnose
from klbench.core.guide import GLOSSARY, STEPS, GuideFacts, where_we_are

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
