"""A table of situations: what the verdict must say, how sure it may be, and what it must propose next.

Each row is one thing that people met (or its twin that looks alike), made to its signature; those in which
something was tried or located are in situations_settled.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from situation import GROSS, ONE, RUN, SMALL, TWO, Situation
from situations import REQUESTS, Run, both, clean, from_offset, from_position, lengths, noise, on_hits, where
from situations_settled import RESIDUE_3, SETTLED

from klbench.core.experiments import CATALOGUE

BACK_TO_BACK = Run(page=16, extend_rows=lambda index: 1 + (index * 37) % 90)

OF_RUNS = [
    # The helper matrix: what was and was not compared.
    Situation("all clean", RUN.three(), "none", set(), "probable", says=["all_equal", "few_samples"]),
    Situation(
        "radix cache off: two helpers not run",
        [RUN.helper("match")],
        "undecided", set(), "unknown", next=["answer_helper", "answer_helper"],
        missing={"prefill_cache_hit": "not_run", "decode_cache_hit": "not_run"}, says=["equal_so_far"],
    ),
    Situation(
        "a helper ended with an error",
        [RUN.helper("match"), RUN.helper("prefill_cache_hit")],
        "undecided", set(), "unknown", next=["answer_helper"], missing={"decode_cache_hit": "error"},
    ),
    Situation(
        "nothing compared at all", [], "undecided", set(), "unknown", next=["answer_helper"],
        missing={"match": "error"}, says=["nothing_compared"],
    ),
    Situation(
        "too few hits, and those agree",
        [RUN.helper("match"), RUN.helper("prefill_cache_hit", miss=lambda i: i % 2 == 0),
         RUN.helper("decode_cache_hit")],
        "undecided", set(), "unknown", next=["answer_helper"],
    ),
    Situation(
        "no hit at all in one helper (a checkpoint only at a sequence's end)",
        [RUN.helper("match"), RUN.helper("prefill_cache_hit", miss=lambda _: True),
         RUN.helper("decode_cache_hit")],
        "undecided", set(), "unknown", next=["answer_helper"],
    ),
    Situation(
        "too few hits, and those differ",
        [RUN.helper("match"), RUN.helper("prefill_cache_hit", GROSS, miss=lambda i: i % 4 != 0)],
        "found", {TWO}, "probable", "wrong_restore", ["locate", "wide_restore"],
    ),
    Situation(
        "match dirty while the others could not run",
        [RUN.helper("match", SMALL)], "found", {ONE}, "probable", "row_count", ["locate", "census"],
        missing={"prefill_cache_hit": "not_run", "decode_cache_hit": "not_run"},
    ),
    Situation(
        "only a hit helper was run and is dirty",
        [RUN.helper("prefill_cache_hit", GROSS)],
        "found", {ONE, TWO}, "unknown", None, ["locate", "run_match"], says=["no_cold_control"],
    ),
    # Paths, not names.
    Situation(
        "prompts with a common prefix: the dirty requests of match are hits",
        [Run(shared=96).helper("match", on_hits(GROSS))],
        "found", {TWO}, "probable", "wrong_restore", ["locate", "wide_restore"], says=["match_hits"],
    ),
    Situation(
        "prompts with a common prefix, all clean: match was not cold",
        [Run(shared=96).helper("match")], "none", set(), "probable", says=["match_hits"],
    ),
    Situation(
        "only prefill_cache_hit is dirty",
        RUN.three(clean, GROSS, clean), "found", {TWO}, "probable", "wrong_restore", ["locate",
        "wide_restore"],
        says=["hits_only", "before_decode"],
    ),
    Situation(
        "only decode_cache_hit is dirty (an entry that decode wrote)",
        RUN.three(clean, clean, GROSS), "found", {TWO}, "probable", "wrong_restore", ["locate",
        "wide_restore"],
        says=["some_hits_clean"],
    ),
    # Restores.
    Situation(
        "a restore fault on requests of one residue",
        RUN.three(clean, RESIDUE_3), "found", {TWO}, "probable", "wrong_restore", ["locate"],
        says=["residue"],
    ),
    Situation(
        "the first request of each batch is spared (a checkpoint indexed by the batch)",
        RUN.three(clean, where(lambda r: r.index > 0, GROSS)),
        "found", {TWO}, "probable", "wrong_restore", ["locate", "wide_restore", "alone"], says=["place"],
    ),
    Situation(
        "later requests only, since slots were given out in another order",
        RUN.three(clean, where(lambda r: r.index >= 20, GROSS)),
        "found", {TWO}, "probable", "wrong_restore", ["locate", "alone"], says=["place"],
    ),
    Situation(
        "a hit-only arithmetic fault that the row count sets apart",
        BACK_TO_BACK.three(clean, where(lambda r: r.prompt_len - r.cached <= 16, noise(1e-3, first=0))),
        "found", {ONE}, "probable", "few_row_extend", ["locate", "wide_restore"], says=["split"],
    ),
    Situation(
        "a hit-only fault, small, all extends of one row: the restore is suspected, its rival named",
        RUN.three(clean, noise(1e-3, first=0)),
        "found", {TWO}, "probable", "wrong_restore", ["locate", "wide_restore"], says=["equal_m_undecided"],
    ),
    Situation(
        "hits diverge late only: no restore is wrong from the start",
        RUN.three(clean, from_offset(20, 0.1)),
        "found", {TWO}, "probable", "decode_step", ["locate"],
    ),
    # Condition 1.
    Situation(
        "an operator rounds by the number of rows: all helpers, small, from the first decoded token",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        says=["small_from_the_start", "condition_2_hidden"],
    ),
    Situation(
        "prefill differs from prefill, too",
        RUN.three(noise(1e-3, first=0)), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        says=["prefill_differs_too"],
    ),
    Situation(
        "deterministic inference off", RUN.three(SMALL), "found", {ONE}, "probable", "not_deterministic",
        ["locate", "deterministic"], server={"deterministic": False},
    ),
    Situation(
        "a tile edge at a constant absolute index, quantised K/V",
        Run([60 + i for i in range(REQUESTS)]).three(from_position(97, 0.3)),
        "found", {ONE}, "probable", "tile_edge", ["locate", "kv_dtype"],
        server={"kv_cache_dtype": "fp8_e4m3"},
        says=["tile"],
    ),
    Situation(
        "a constant absolute index that begins no tile",
        Run([60 + i for i in range(REQUESTS)]).three(from_position(100, 0.01)),
        "found", {ONE, TWO}, "unknown", None, ["locate", "equal_m"], says=["both_remain"],
    ),
    Situation(
        "a mixture-of-experts model: small cause, and no threshold by analogy",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        server={"architectures": ["Qwen3MoeForCausalLM"]}, says=["experts"],
    ),
    Situation(
        "a floor-not-zero operator: scan and recurrence",
        RUN.three(SMALL), "found", {ONE}, "probable", "floor_not_zero", ["locate", "control"],
        server={"architectures": ["Qwen3NextForCausalLM"]}, says=["floor"],
    ),
    Situation(
        "quantised weights under the deterministic flag",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        server={"quantization": "fp8"},
    ),
    # Condition 2 without a restore.
    Situation(
        "a window slip that fails all three helpers, the window between two tiles",
        Run([60 + i for i in range(REQUESTS)]).three(from_position(101, 0.2)),
        "found", {TWO}, "probable", "window_slip", ["locate", "equal_m"], server={"sliding_window": 100},
        says=["window_edge"],
    ),
    Situation(
        "a window slip where a tile ends at the same row stays open",
        Run([40 + i for i in range(REQUESTS)]).three(from_position(65, 0.2)),
        "found", {ONE, TWO}, "unknown", None, ["locate", "equal_m"], server={"sliding_window": 64},
    ),
    Situation(
        "a window slip with prompts that are all longer than the window",
        RUN.three(from_offset(1, 0.2)),
        "found", {ONE, TWO}, "unknown", "window_slip", ["locate", "equal_m"], server={"sliding_window": 64},
    ),
    Situation(
        "a window in the model, but the divergence begins inside it",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        server={"sliding_window": 4096},
    ),
    Situation(
        "decode changes after a fixed number of steps",
        RUN.three(from_offset(17, 0.1)), "found", {TWO}, "probable", "decode_step", ["locate", "equal_m"],
        says=["constant_offset"],
    ),
    Situation(
        "a checkpoint interval that decode crosses",
        RUN.three(lambda r: from_offset((32 - r.prompt_len) % 32 + 1, 0.05)(r)),
        "found", {TWO}, "probable", "interval", ["locate", "equal_m"], says=["residue"],
    ),
    Situation(
        "a hand-off that is wrong unless the length is a multiple of 32, recurrent model",
        Run([32 * (3 + i % 8) if i % 3 == 0 else 97 + 13 * i for i in range(REQUESTS)]).three(
            where(lambda r: r.prompt_len % 32 != 0, from_offset(1, 0.2)), clean
        ),
        "found", {TWO}, "probable", "length_residue", ["locate", "pad"],
        server={"architectures": ["Lfm2ForCausalLM"]}, says=["residue"],
    ),
    Situation(
        "only prompts longer than a prefill chunk",
        RUN.three(where(lambda r: r.prompt_len > 256, from_offset(1, 0.05)), clean),
        "found", {ONE, TWO}, "unknown", "chunk_boundary", ["locate", "chunk_size"],
        server={"chunked_prefill_size": 256}, says=["split"],
    ),
    Situation(
        "log of softmax in one path",
        RUN.three(from_offset(0, 1e-6)), "found", {TWO}, "probable", "definition", ["locate"],
        says=["every_token"],
    ),
    Situation(
        "gross differences everywhere", RUN.three(GROSS), "found", {ONE, TWO}, "unknown", None,
        ["locate", "equal_m"], says=["both_remain"],
    ),
    Situation(
        "a logprob that is no number",
        [RUN.helper("match", nan_at=5)], "found", {ONE, TWO}, "unknown", "not_numbers", ["locate", "repeats"],
    ),
    # Two faults, one hiding the other.
    Situation(
        "small noise everywhere and a gross restore fault on hits",
        RUN.three(SMALL, both(SMALL, from_offset(0, 0.4))),
        "found", {ONE, TWO}, "probable", "row_count", ["locate", "census", "equal_m"],
        says=["hits_much_larger"],
    ),
    Situation(
        "noise everywhere that would hide a restore fault of its own size",
        RUN.three(SMALL, both(SMALL, noise(1e-3, first=0, seed=9))),
        "found", {ONE}, "probable", "row_count", ["locate", "census"], says=["condition_2_hidden"],
    ),
    Situation(
        "a floor that is not zero, and hits far above it",
        RUN.three(noise(1e-4), both(noise(1e-4), from_offset(0, 0.05))),
        "found", {ONE, TWO}, "probable", "floor_not_zero", ["locate", "control"],
        server={"architectures": ["Qwen3NextForCausalLM"]}, says=["hits_much_larger"],
    ),
    # Races.
    Situation(
        "two of 32 requests in the middle of their generation, without a pattern",
        RUN.three(where(lambda r: r.index in (4, 19), lambda r: from_offset(7 + r.index, 0.3)(r)), clean),
        "found", {ONE, TWO}, "unknown", None, ["locate", "repeats"],
    ),
]  # fmt: skip

SITUATIONS = [*OF_RUNS, *SETTLED]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_the_verdict_on(situation: Situation) -> None:
    verdict = situation.verdict()
    summary = [(h["code"], h["grade"], h["conditions"]) for h in verdict["hypotheses"]]
    assert verdict["status"] == situation.status
    assert (set(verdict["conditions"]), verdict["grade"]) == (situation.conditions, situation.grade), summary
    if situation.leads is not None:
        assert summary[0][0] == situation.leads, summary
    steps = [step["code"] for step in verdict["next"]]
    assert [step for step in steps if step in situation.next][: len(situation.next)] == list(
        situation.next
    ), steps
    codes = {item["code"] for item in verdict["evidence"]}
    codes |= {fact["code"] for h in verdict["hypotheses"] for fact in h["for"]}
    assert set(situation.says) <= codes, codes


CONFIRMED = [s for s in SITUATIONS if s.grade == "confirmed"]


@pytest.mark.parametrize("situation", CONFIRMED, ids=lambda s: s.name)
def test_what_is_confirmed_asks_for_no_experiment_but_of_another_condition(situation: Situation) -> None:
    verdict = situation.verdict()
    others = {
        hypothesis["next"]["code"]
        for hypothesis in verdict["hypotheses"]
        if hypothesis["grade"] == "probable" and not situation.conditions.issuperset(hypothesis["conditions"])
    }
    assert {step["code"] for step in verdict["next"]} & CATALOGUE.keys() <= others


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_a_run_alone_confirms_nothing(situation: Situation) -> None:
    verdict = replace(situation, findings=(), experiments=()).verdict()
    assert verdict["grade"] != "confirmed"
    assert all(hypothesis["grade"] != "confirmed" for hypothesis in verdict["hypotheses"])


@pytest.mark.parametrize("situation", [s for s in SITUATIONS if s.status == "found"], ids=lambda s: s.name)
def test_every_hypothesis_has_a_next_step_and_an_experiment_its_cost(situation: Situation) -> None:
    for hypothesis in situation.verdict()["hypotheses"]:
        step = hypothesis["next"]
        assert step["text"]
        if "experiment" in step["values"]:
            assert set(step["values"]["cost"]) == {"launches", "passes"}


def test_the_table_is_long_enough() -> None:
    assert len({situation.name for situation in SITUATIONS}) >= 30


def test_lengths_have_no_order() -> None:
    assert sorted(lengths(300)) != lengths(300)
