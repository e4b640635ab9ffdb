"""From the numbers of a run to a verdict that is never more certain than its evidence.

    >>> verdict = diagnose(results, columns, server)
    >>> verdict["status"], verdict["conditions"], verdict["grade"]
    ('found', ['different_function'], 'probable')

The verdict is the object of klbench.run/1. Two conditions make prefill and decode equal, batch invariance and
the same function of the same state; a run alone can make one of them probable, never confirmed. What a run
did not exercise is part of its evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.exercised import what_was_exercised
from klbench.core.kl import HelperSummary, summarise
from klbench.core.signature import Signature, read_signature
from klbench.core.thresholds import USUAL_REQUESTS, USUAL_TOKENS

BATCH_INVARIANCE = "batch_invariance"
DIFFERENT_FUNCTION = "different_function"

_ROUNDING_MEDIAN_NATS = 0.02
_ROUNDING_MAX_NATS = 1.0
"""Rounding makes small differences without a huge tail; wrong state or a wrong mask need not."""


@dataclass(slots=True)
class _Verdict:
    """The parts of a verdict while it is made."""

    status: str = "undecided"
    conditions: list[str] = field(default_factory=list)
    grade: str = "unknown"
    evidence: list[dict[str, Any]] = field(default_factory=list)
    next: list[dict[str, Any]] = field(default_factory=list)

    def because(self, code: str, text: str, **values: Any) -> None:
        self.evidence.append({"code": code, "text": text, "values": values})

    def then(self, code: str, text: str, **values: Any) -> None:
        self.next.append({"code": code, "text": text, "values": values})

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "conditions": self.conditions,
            "grade": self.grade,
            "evidence": self.evidence,
            "next": self.next,
        }


def first_divergent(
    results: Mapping[HelperName, Mapping[str, Any]], summaries: Mapping[HelperName, HelperSummary]
) -> tuple[HelperName, int] | None:
    """The first helper, in the order of HELPERS, that has a divergent request, and its first such request.

    Helpers that were past their threshold come before those that only have divergent tokens.
    """
    for only_diverged in (True, False):
        for helper in HELPERS:
            summary = summaries.get(helper)
            if summary is None or not summary.divergent:
                continue
            if only_diverged and results.get(helper, {}).get("status") != "diverged":
                continue
            return helper, int((summary.divergent_tokens > 0).argmax())
    return None


def diagnose(
    results: Mapping[HelperName, Mapping[str, Any]],
    columns: Mapping[HelperName, HelperColumns],
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """The verdict on a run: `results` and `columns` of its helpers, `server` as in klbench.run/1."""
    summaries = {helper: summarise(part) for helper, part in columns.items()}
    moduli = {
        name: value
        for name in ("page_size", "chunked_prefill_size", "sliding_window")
        if isinstance(value := server.get(name), int) and value > 1
    }
    signatures = [
        read_signature(columns[helper], summaries[helper], moduli=moduli)
        for helper in HELPERS
        if helper in columns
    ]
    verdict = _Verdict()
    first = first_divergent(results, summaries)
    if first is None:
        _without_divergence(verdict, results)
    else:
        _with_divergence(verdict, signatures, server)
        helper, request = first
        verdict.next.insert(
            0,
            {
                "code": "locate",
                "text": f"locate the origin: {helper}, request {request}",
                "values": {"helper": helper, "request": request},
            },
        )
    _helper_lines(verdict, results)
    if first is not None:
        _describe(verdict, signatures)
    for item in what_was_exercised(columns, server):
        verdict.because(item.code, item.text, **item.values)
        if item.advice is not None:
            verdict.then(item.code, item.advice, **item.values)
    _sample_size(verdict, results, columns)
    return verdict.as_dict()


def _without_divergence(verdict: _Verdict, results: Mapping[HelperName, Mapping[str, Any]]) -> None:
    open_helpers = [helper for helper, result in results.items() if result.get("status") != "clean"]
    tokens = sum(result.get("tokens") or 0 for result in results.values())
    if results and not open_helpers:
        verdict.status, verdict.grade = "none", "probable"
        verdict.because(
            "all_equal",
            f"all {tokens} tokens that were compared are bit-equal in prefill and decode",
            tokens=tokens,
        )
        return
    if tokens:
        verdict.because(
            "equal_so_far",
            f"all {tokens} tokens that were compared are bit-equal, but not every helper has an answer",
            tokens=tokens,
        )
    else:
        verdict.because("nothing_compared", "no token was compared")
    for helper in open_helpers:
        reason = results[helper].get("reason") or results[helper].get("status")
        verdict.then("answer_helper", f"{helper} has no answer: {reason}", helper=helper)
    if not results:
        verdict.then("run", "run the three helpers")


def _with_divergence(verdict: _Verdict, signatures: list[Signature], server: Mapping[str, Any]) -> None:
    verdict.status = "found"
    cold, cold_dirty = sum(s.cold for s in signatures), sum(s.cold_dirty for s in signatures)
    hit, hit_dirty = sum(s.hit for s in signatures), sum(s.hit_dirty for s in signatures)
    counts = {"cold": cold, "cold_dirty": cold_dirty, "hit": hit, "hit_dirty": hit_dirty}
    if server.get("deterministic") is False:
        verdict.conditions, verdict.grade = [BATCH_INVARIANCE], "probable"
        verdict.because(
            "not_deterministic",
            "the server runs without deterministic inference: its operators may round differently with every "
            "batch, and that noise hides everything else",
            **counts,
        )
        verdict.then(
            "deterministic",
            "settle condition 1 first: start the server with --enable-deterministic-inference",
        )
    elif hit_dirty and cold and not cold_dirty:
        verdict.conditions, verdict.grade = [DIFFERENT_FUNCTION], "probable"
        verdict.because(
            "hits_only",
            f"only requests that restored a cached prefix diverge ({hit_dirty} of {hit}; none of {cold} cold "
            "ones): the restored state is suspected",
            **counts,
        )
        verdict.because(
            "equal_m_undecided",
            "extends of few rows happen on hits only, so arithmetic that depends on the number of rows would "
            "look the same until equal row counts are compared",
        )
        verdict.then(
            "equal_m",
            "compare the same token as decode and as a one-token extend on the same cached prefix: the row "
            "counts are equal, so what still differs is state and not rounding",
        )
    elif hit_dirty and not cold:
        verdict.conditions = [BATCH_INVARIANCE, DIFFERENT_FUNCTION]
        verdict.because(
            "no_cold_control",
            f"{hit_dirty} of {hit} requests that restored a prefix diverge, and no cold request was compared",
            **counts,
        )
        verdict.then("run_match", "run match, whose requests restore nothing", helper="match")
    else:
        _with_cold_divergence(verdict, signatures, server, counts)


def _with_cold_divergence(
    verdict: _Verdict, signatures: list[Signature], server: Mapping[str, Any], counts: dict[str, int]
) -> None:
    """Requests without a restore diverge: arithmetic, or a mask, window, position or definition."""
    dirty = [s for s in signatures if s.cold_dirty]
    shapes = {s.where for s in dirty}
    text = (
        f"requests that restored nothing diverge ({counts['cold_dirty']} of {counts['cold']}): decode and "
        "prefill disagree on the same tokens without any restore"
    )
    if shapes == {"constant_offset"}:
        verdict.conditions, verdict.grade = [DIFFERENT_FUNCTION], "probable"
        offset = dirty[0].first_offset
        verdict.because("cold_dirty", text, **counts)
        verdict.because(
            "constant_offset",
            f"each of them begins at offset {offset[0] if offset else 0}, whatever the prompt's length: "
            "something changes after a fixed number of decode steps; rounding would not wait",
            offset=offset[0] if offset else None,
        )
        return
    if shapes == {"constant_position"}:
        verdict.conditions = [BATCH_INVARIANCE, DIFFERENT_FUNCTION]
        position = dirty[0].first_position
        verdict.because("cold_dirty", text, **counts)
        verdict.because(
            "constant_position",
            f"each of them begins at position {position[0] if position else 0}: the edge of a tile "
            "(arithmetic) or of a window (mask)",
            position=position[0] if position else None,
        )
        verdict.then("pad", "pad the prompts by a few tokens: an edge of a tile or window stays where it is")
        return
    verdict.because("cold_dirty", text, **counts)
    small = all(
        s.median_abs_nats <= _ROUNDING_MEDIAN_NATS and s.max_abs_nats <= _ROUNDING_MAX_NATS for s in dirty
    )
    early = shapes <= {"from_first_token", "mixed"}
    if early and small and server.get("sliding_window") is None:
        verdict.conditions, verdict.grade = [BATCH_INVARIANCE], "probable"
        verdict.because(
            "small_from_the_start",
            "the differences are small and begin with the first decoded tokens, as rounding that depends on "
            "the number of rows does; a wrong position or mask of small effect would look alike",
        )
    else:
        verdict.conditions = [BATCH_INVARIANCE, DIFFERENT_FUNCTION]
        verdict.because(
            "both_remain",
            "rounding that depends on the batch, and a wrong mask, window, position or definition of the "
            "logprob, both remain possible",
        )
    verdict.then("census", "call each operator alone at several row counts to see which one is not invariant")


def _helper_lines(verdict: _Verdict, results: Mapping[HelperName, Mapping[str, Any]]) -> None:
    for helper, result in results.items():
        tokens, hits = result.get("tokens") or 0, result.get("hits")
        said = f"{helper}: {result.get('status')}"
        if tokens:
            said += (
                f", {result.get('divergent_tokens')} of {tokens} tokens differ, hits "
                f"{hits}/{result.get('requests')}"
            )
        if result.get("reason"):
            said += f" ({result['reason']})"
        verdict.because(
            "helper",
            said,
            helper=helper,
            helper_status=result.get("status"),
            tokens=tokens,
            divergent_tokens=result.get("divergent_tokens"),
            hits=hits,
        )


def _describe(verdict: _Verdict, signatures: list[Signature]) -> None:
    for signature in signatures:
        if not signature.dirty:
            continue
        first, position = signature.first_offset, signature.first_position
        if first is None or position is None:
            continue
        verdict.because(
            "where",
            f"{signature.helper}: {signature.dirty} requests, first divergence at offset {_span(first)}, "
            f"position {_span(position)}; {signature.contiguous_fraction:.0%} of the tokens from there on "
            f"differ, median {signature.median_abs_nats:.2g}, largest {signature.max_abs_nats:.2g} nats",
            helper=signature.helper,
            where=signature.where,
            first_offset=list(first),
            first_position=list(position),
            contiguous_fraction=signature.contiguous_fraction,
        )
        if signature.before_decode and signature.hit_dirty:
            verdict.because(
                "before_decode",
                f"{signature.helper}: in {signature.before_decode} requests the first generated token, which "
                "an extend computes, already differs: something was wrong before decode began",
                helper=signature.helper,
                requests=signature.before_decode,
            )
        for residue in signature.residues[:3]:
            verdict.because(
                "residue",
                f"{signature.helper}: {residue.sentence} (by chance: {residue.chance:.1g})",
                helper=signature.helper,
                quantity=residue.quantity,
                modulus=residue.modulus,
                residue=residue.residue,
                chance=residue.chance,
            )


def _span(values: tuple[int, int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]} to {values[1]}"


def _sample_size(
    verdict: _Verdict,
    results: Mapping[HelperName, Mapping[str, Any]],
    columns: Mapping[HelperName, HelperColumns],
) -> None:
    requests = min((part.requests for part in columns.values()), default=0)
    output = min((int(part.output_len.max(initial=0)) for part in columns.values()), default=0)
    if columns and (requests < USUAL_REQUESTS or output < USUAL_TOKENS):
        verdict.because(
            "few_samples",
            f"{requests} requests of {output} tokens; sglang measures {USUAL_REQUESTS} of {USUAL_TOKENS}, "
            "and fewer can miss a rare divergence",
            requests=requests,
            tokens_each=output,
            helpers=list(results),
        )
