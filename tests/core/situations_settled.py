"""Situations in which experiments were made or an origin was located: what they may raise, and what not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from situation import GROSS, ONE, RACE, RUN, SMALL, TWO, Situation
from situations import REQUESTS, Run, both, clean, from_offset, noise, where


def finding(kind: str, module: str, grade: str = "confirmed", *more: str, **fields: Any) -> dict[str, Any]:
    kinds = [kind, *more]
    return {
        "kind": kind,
        "kinds": kinds,
        "module": module,
        "grade": grade,
        "latent": False,
        "evidence": [],
        **fields,
    }


def outcome(name: str, result: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "outcome": result, "text": f"{name}: {result}", "values": values}


def ulps(structured: bool, pattern: str) -> list[dict[str, Any]]:
    return [
        {"code": "ulps", "text": "", "values": {"structured": structured, "pattern": pattern, "max_ulps": 3}}
    ]


def fact(code: str, **values: Any) -> dict[str, Any]:
    return {"code": code, "text": "", "values": values}


ROTARY = "model.layers.1.self_attn.rotary_emb"
RECURRENCE, DELTA_RULE = "model.layers.0.linear_attn.attn", "delta_rule_reference"
ALONE_INVARIANT = [fact("replay_invariant")]
BY_ROWS = [fact("row_counts", outcome="changes", changed_M=[64])]
ONE_ROW_OTHERWISE = [*ALONE_INVARIANT, fact("equal_m", outcome="differs", stateful=False)]
ROWS_LEFT = [*ALONE_INVARIANT, fact("not_confirmed", missing=["replay"])]
ULPS_IN_BLOCKS, FEW_ULPS = ulps(True, "block"), ulps(False, "scattered")
ATTENTION, OTHER_BATCH = "model.layers.1.self_attn.attn", fact("other_batch", forwards=23, same=11)
WROTE_K = fact("state_write", arguments=["k"])
OTHER_BITS = fact("capture_changed_logprobs", count=6)
RESIDUE_3 = where(lambda r: r.hit and r.cached % 8 == 3, from_offset(0, 0.02))

SETTLED = [
    Situation(
        "a race that repeats have shown",
        RUN.three(where(lambda r: r.index in (4, 19), lambda r: from_offset(7 + r.index, 0.3)(r)), clean),
        "found", {RACE}, "confirmed", "race", ["locate"], experiments=[outcome("repeats", "differs")],
    ),
    Situation(
        "hits only, the wide restore still differs, cold requests went in chunks",
        RUN.three(clean, GROSS), "found", {TWO}, "confirmed", "wrong_restore", ["locate"],
        server={"chunked_prefill_size": 128}, experiments=[outcome("wide_restore", "differs")],
    ),
    Situation(
        "hits only, the wide restore still differs, but no cold request went in chunks",
        RUN.three(clean, GROSS), "found", {TWO}, "probable", "wrong_restore", ["locate", "cold_chunks"],
        experiments=[outcome("wide_restore", "differs")],
    ),
    Situation(
        "hits only, and clean when the extend is wide",
        RUN.three(clean, noise(1e-3, first=0)), "found", {ONE}, "probable", "few_row_extend", ["locate"],
        experiments=[outcome("wide_restore", "vanished")],
    ),
    Situation(
        "gross everywhere, equal rows still differ: not as rounding does, but no size is a proof",
        RUN.three(GROSS), "found", {TWO}, "probable", "window_slip", ["locate"],
        experiments=[outcome("equal_m", "differs")], says=["other_kernel"],
    ),
    Situation(
        "as large as a kernel that splits the keys otherwise makes it (triton on an H200), equal rows differ",
        RUN.three(noise(0.075)), "found", {ONE, TWO}, "unknown", None, ["locate"],
        experiments=[outcome("equal_m", "differs")],
    ),
    Situation(
        "the same, and its attention recomputed from its inputs only rounds",
        RUN.three(noise(0.075)), "found", {ONE}, "confirmed", None, [],
        findings=[
            finding(
                "operator", "model.layers.1.self_attn.attn",
                evidence=[fact("attention_reference", verdict="rounding")],
            )
        ],
        experiments=[outcome("equal_m", "differs")],
    ),
    Situation(
        "a gated delta rule whose state nobody saw: both conditions are left",
        RUN.three(noise(0.075)), "found", {ONE, TWO}, "unknown", None, ["equal_m"],
        findings=[finding("operator", RECURRENCE, "unknown", "state_restore", "state_write", "not_observed")],
    ),
    Situation(
        "the same, and recomputed from its inputs both arms are the same recurrence",
        RUN.three(noise(0.075)), "found", {ONE}, "confirmed", None, [],
        findings=[finding("operator", RECURRENCE, evidence=[fact(DELTA_RULE, verdict="rounding")])],
    ),
    Situation(
        "the same, and decode went on from another state than its inputs make",
        RUN.three(noise(0.075)), "found", {TWO}, "probable", None, [],
        findings=[
            finding(
                "state_restore", RECURRENCE, "probable", "state_write", "operator",
                evidence=[fact(DELTA_RULE, verdict="other_function")],
            )
        ],
    ),
    Situation(
        "small everywhere, equal rows still differ: another kernel rounds otherwise, too",
        RUN.three(SMALL), "found", {ONE, TWO}, "unknown", None, ["locate", "census"],
        experiments=[outcome("equal_m", "differs")],
    ),
    Situation(
        "everywhere from decode on, equal rows agree: arithmetic, but never more than probable",
        RUN.three(noise(0.3)), "found", {ONE}, "probable", "row_count", ["locate"],
        experiments=[outcome("equal_m", "same_bits")],
    ),
    Situation(
        "every token by much, equal rows agree: scores may be defined otherwise",
        RUN.three(GROSS), "found", {ONE, TWO}, "unknown", "definition", ["locate"],
        experiments=[outcome("equal_m", "same_bits")],
    ),
    Situation(
        "hits only: an arm that is made of hits decides nothing",
        RUN.three(clean, noise(1e-3, first=0)), "found", {TWO}, "probable", "wrong_restore",
        ["locate", "wide_restore"], experiments=[outcome("equal_m", "differs")],
    ),
    Situation(
        "a flag that changed nothing concludes nothing",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", ["locate", "census"],
        experiments=[outcome("overlap", "no_effect")],
    ),
    Situation(
        "without the overlap nothing diverges, in the same batches",
        RUN.three(GROSS), "found", {RACE}, "probable", "race", ["locate", "equal_m"],
        experiments=[outcome("overlap", "vanished", composed_equally=True)],
    ),
    Situation(
        "without the overlap nothing diverges, but its batches were others: row counts explain it as well",
        RUN.three(GROSS), "found", {ONE, TWO}, "unknown", None, ["locate", "equal_m"],
        experiments=[outcome("overlap", "vanished", composed_equally=False)],
    ),
    Situation(
        "located in a projection, confirmed",
        RUN.three(SMALL), "found", {ONE}, "confirmed", "row_count", [],
        findings=[finding("operator", "model.layers.1.self_attn.o_proj")],
    ),
    Situation(
        "located in a restored state, confirmed",
        RUN.three(clean, RESIDUE_3), "found", {TWO}, "confirmed", "wrong_restore", [],
        findings=[finding("state_restore", "model.layers.1.self_attn.attn")],
    ),
    Situation(
        "K/V written wrongly from equal inputs, captured in another batch: a copy rounds in none",
        RUN.three(GROSS), "found", {TWO}, "probable", None, [],
        findings=[finding("state_write", ATTENTION, "unknown", evidence=[WROTE_K, OTHER_BITS, OTHER_BATCH])],
    ),
    Situation(
        "a restore that is not what was written, captured in another batch",
        RUN.three(clean, GROSS), "found", {TWO}, "probable", "wrong_restore", [],
        findings=[
            finding("state_restore", ATTENTION, "unknown", evidence=[fact("state_restore"), OTHER_BATCH])
        ],
    ),
    Situation(
        "K/V written wrongly with other bits in equal batches: state or a race",
        RUN.three(GROSS), "found", {RACE}, "probable", "race", [],
        findings=[finding("state_write", ATTENTION, "unknown", evidence=[WROTE_K, OTHER_BITS])],
    ),
    Situation(
        "a recurrent state, computed when it is written, captured in another batch: no more than before",
        RUN.three(GROSS), "found", {ONE, TWO}, "unknown", None, [],
        findings=[
            finding(
                "state_write", RECURRENCE, "unknown",
                evidence=[fact("state_write", arguments=["temporal"]), OTHER_BATCH],
            )
        ],
    ),
    Situation(
        "K/V written wrongly in a capture that did not diverge: no more than before",
        RUN.three(GROSS), "found", {ONE, TWO}, "unknown", None, [],
        findings=[finding("state_write", ATTENTION, "unknown", evidence=[WROTE_K, fact("symptom_gone")])],
    ),
    Situation(
        "located in attention with both kinds left: no more than before",
        RUN.three(GROSS), "found", {ONE, TWO}, "unknown", None, ["equal_m"],
        findings=[finding("operator", "model.layers.1.self_attn.attn", "probable", "state_write")],
    ),
    Situation(
        "located in attention, gross and in blocks: another function, but no proof of it",
        RUN.three(GROSS), "found", {TWO}, "probable", None, [],
        findings=[finding("operator", "model.layers.1.self_attn.attn", evidence=ULPS_IN_BLOCKS)],
    ),
    Situation(
        "located in attention, a few ulps: arithmetic, but no proof of it",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", [],
        findings=[finding("operator", "model.layers.1.self_attn.attn", evidence=FEW_ULPS)],
    ),
    Situation(
        "located in a projection whose replay changes with the rows",
        RUN.three(GROSS), "found", {ONE}, "confirmed", "row_count", [],
        findings=[finding("operator", "model.layers.1.something", replay_M=64)],
    ),
    Situation(
        "located in what is computed behind a restored prefix, alone invariant, other bits at equal M",
        RUN.three(clean, SMALL), "found", {TWO}, "confirmed", "wrong_restore", [],
        findings=[finding("operator", ROTARY, evidence=ONE_ROW_OTHERWISE)],
    ),
    Situation(
        "located after some decode steps, alone invariant: to be sent alone",
        RUN.three(from_offset(9, 0.01)), "found", {TWO}, "probable", "decode_step", ["alone"],
        findings=[finding("operator", "model.layers.2.input_layernorm", "probable", evidence=ROWS_LEFT)],
    ),
    Situation(
        "located, alone invariant, and alone the request diverges with the same bits",
        RUN.three(from_offset(9, 0.01)), "found", {TWO}, "confirmed", "decode_step", [],
        findings=[finding("operator", "model.layers.2.input_layernorm", "probable", evidence=ROWS_LEFT)],
        experiments=[outcome("alone", "same_bits")],
    ),
    Situation(
        "located, alone invariant, and alone the request is clean: other rows decide, nothing is proved",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", [],
        findings=[finding("operator", "model.layers.2.input_layernorm", "probable", evidence=ROWS_LEFT)],
        experiments=[outcome("alone", "vanished")],
    ),
    Situation(
        "located in a gap that follows the number of rows alone, at a page size without an equal-M arm",
        RUN.three(SMALL), "found", {ONE}, "confirmed", "row_count", [], server={"page_size": 16},
        findings=[finding("gap", "model.layers.1.self_attn.o_proj -> model.norm", evidence=BY_ROWS)],
    ),
    Situation(
        "located in a gap that nothing more is known of",
        RUN.three(SMALL), "found", {ONE}, "probable", "row_count", [], server={"page_size": 16},
        findings=[finding("gap", "model.layers.1.self_attn.o_proj -> model.norm")],
    ),
    Situation(
        "a small residue of lengths that padding followed as predicted: it says where, not why",
        Run([32 * (3 + i % 8) if i % 3 == 0 else 97 + 13 * i for i in range(REQUESTS)]).three(
            where(lambda r: r.prompt_len % 32 != 0, from_offset(1, 0.005)), clean
        ),
        "found", {ONE}, "probable", "row_count", ["locate"], experiments=[outcome("pad", "predicted")],
    ),
    Situation(
        "a residue of lengths that padding refuted",
        Run([32 * (3 + i % 8) if i % 3 == 0 else 97 + 13 * i for i in range(REQUESTS)]).three(
            where(lambda r: r.prompt_len % 32 != 0, from_offset(1, 0.2)), clean
        ),
        "found", {ONE, TWO}, "unknown", None, ["locate"],
        server={"architectures": ["Lfm2ForCausalLM"]}, experiments=[outcome("pad", "refuted")],
    ),
    Situation(
        "two confirmed origins of different conditions",
        RUN.three(SMALL, both(SMALL, from_offset(0, 0.4))), "found", {ONE, TWO}, "confirmed", None, [],
        findings=[finding("operator", "model.layers.0.mlp.down_proj"),
                  finding("state_restore", "model.layers.1.self_attn.attn")],
    ),
]  # fmt: skip
