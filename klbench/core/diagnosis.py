"""From the numbers of a run to a verdict that is never more certain than its evidence.

    >>> verdict = diagnose(results, columns, server)
    >>> verdict["status"], verdict["conditions"], verdict["grade"]
    ('found', ['different_function'], 'probable')
    >>> [h["code"] for h in verdict["hypotheses"]]
    ['wrong_restore', 'few_row_extend', 'race']

The verdict is the object of klbench.run/1. Two conditions make prefill and decode equal, batch invariance and
the same function of the same state; a run alone can make one of them probable, never confirmed: findings of
`klbench locate` and experiments do that. What a run did not exercise is part of its evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klbench.core.columns import HELPERS, HelperColumns, HelperName
from klbench.core.exercised import what_was_exercised
from klbench.core.experiments import DIFFERS, MOVED, NOT_POSSIBLE, SAME, VANISHED
from klbench.core.explanations import explain
from klbench.core.hypotheses import Hypothesis, conditions_of, next_step, rank
from klbench.core.kl import HelperSummary, summarise
from klbench.core.scene import Scene, make_scene
from klbench.core.settled import settle
from klbench.core.signature import PathReading, Signature, read_signature
from klbench.core.statistics import sample_warning
from klbench.core.text import counted

_SHOWN_STEPS = 3
"""A verdict proposes so many deciding experiments at most; each hypothesis names its own."""


@dataclass(slots=True)
class _Verdict:
    """The parts of a verdict while it is made."""

    status: str = "undecided"
    conditions: list[str] = field(default_factory=list)
    grade: str = "unknown"
    evidence: list[dict[str, Any]] = field(default_factory=list)
    next: list[dict[str, Any]] = field(default_factory=list)
    hypotheses: list[dict[str, Any]] = field(default_factory=list)

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
            "hypotheses": self.hypotheses,
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
    *,
    findings: Sequence[Mapping[str, Any]] = (),
    experiments: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The verdict on a run: `results` and `columns` of its helpers, `server` as in klbench.run/1.

    `findings` are those of klbench.locate/1 on this run, `experiments` outcomes as passes.Outcome has them.
    """
    summaries = {helper: summarise(part) for helper, part in columns.items()}
    signatures = [
        read_signature(columns[helper], summaries[helper], server) for helper in HELPERS if helper in columns
    ]
    verdict = _Verdict()
    first = first_divergent(results, summaries)
    if first is None:
        _without_divergence(verdict, results)
    else:
        scene = make_scene(signatures, summaries, server, _retracted(results))
        made = {str(outcome.get("name")) for outcome in experiments}
        ranked = rank(settle(explain(scene), scene, findings, experiments))
        _with_divergence(verdict, scene, ranked, made)
        helper, request = first
        if not findings:
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
    for signature in signatures:
        _about_prompts(verdict, signature)
    for outcome in experiments:
        name = outcome.get("name")
        shown = any(item["code"] == f"experiment_{name}" for item in verdict.evidence)
        if shown or outcome.get("outcome") == NOT_POSSIBLE:
            continue
        verdict.because(f"experiment_{name}", str(outcome.get("text") or ""), outcome=outcome.get("outcome"))
    for item in what_was_exercised(columns, server, graphs_tried=_graphs_tried(experiments)):
        verdict.because(item.code, item.text, **item.values)
        # With a divergence at hand, graphs are the next question only where capture loses it.
        if item.advice is not None and (first is None or item.code != "no_graphs"):
            verdict.then(item.code, item.advice, **item.values)
    _sample_size(verdict, results, columns)
    return verdict.as_dict()


def _graphs_tried(experiments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the helper of an experiment was compared with CUDA graphs on and off."""
    compared = (SAME, DIFFERS, VANISHED, MOVED)
    return any(made.get("name") == "graphs" and made.get("outcome") in compared for made in experiments)


def _retracted(results: Mapping[HelperName, Mapping[str, Any]]) -> dict[HelperName, list[int]]:
    """The requests of each helper that its result says were retracted; results may come from elsewhere."""
    found = {helper: result.get("retracted") for helper, result in results.items()}
    return {
        helper: [request for request in requests if isinstance(request, int)]
        for helper, requests in found.items()
        if isinstance(requests, list)
    }


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


def _with_divergence(
    verdict: _Verdict, scene: Scene, ranked: Sequence[Hypothesis], made: Collection[str]
) -> None:
    """The conditions of the best hypotheses, their evidence, and the experiments, but those that were `made`,
    that would decide."""
    verdict.status = "found"
    verdict.conditions, verdict.grade = conditions_of(ranked)
    verdict.hypotheses = [hypothesis.as_dict(scene.server) for hypothesis in ranked]
    if not ranked:
        return
    leading = [h for h in ranked if h.grade == verdict.grade]
    shown: set[str] = set()
    if verdict.grade == "unknown":
        _why_open(verdict, scene)
        shown = {item["code"] for item in verdict.evidence}
    for hypothesis in leading[: 1 if verdict.grade == "unknown" else len(leading)]:
        for fact in hypothesis.speaks_for:
            if fact.code not in shown:
                shown.add(fact.code)
                verdict.because(fact.code, fact.text, **fact.values)
    best = ranked[0]
    for fact in best.speaks_against:
        if fact.code not in shown:
            shown.add(fact.code)
            verdict.because(fact.code, f"against it: {fact.text}", **fact.values)
    if best.code == "wrong_restore" and best.grade != "confirmed" and "wide_restore" not in made:
        _equal_rows_undecided(verdict, ranked)
    if scene.cold.dirty and scene.hit.dirty and "hits_much_larger" not in shown:
        verdict.because(
            "condition_2_hidden",
            "cold requests diverge, too, so a smaller fault of what hits restore would be hidden: it is "
            "judged "
            "when cold requests are clean",
            **scene.counts,
        )
    # What is confirmed needs no experiment; beside it only another condition that is probable, too, is asked.
    settled = set(verdict.conditions) if verdict.grade == "confirmed" else set()
    steps: list[str] = []
    for hypothesis in ranked:
        if hypothesis.grade == "confirmed":
            continue
        if settled and (hypothesis.grade != "probable" or settled.issuperset(hypothesis.conditions)):
            continue
        worth = hypothesis.grade == "probable" or bool(hypothesis.speaks_for) or hypothesis.weight >= 30
        # No run alone shows that it would repeat itself: what is not confirmed may be a race.
        worth = worth or hypothesis.code == "race"
        known = hypothesis.next in ("locate", *steps, *made)
        if worth and not known:
            steps.append(hypothesis.next)
    for code in steps[:_SHOWN_STEPS]:
        verdict.next.append(next_step(code, scene.server))


def _why_open(verdict: _Verdict, scene: Scene) -> None:
    """What leaves both conditions open."""
    counts = scene.counts
    if not scene.cold.requests:
        verdict.because(
            "no_cold_control",
            f"{counts['hit_dirty']} of {counts['hit']} requests that restored a prefix diverge, and no cold "
            "request was compared",
            **counts,
        )
        return
    if scene.cold.dirty:
        verdict.because(
            "cold_dirty",
            f"requests that restored nothing diverge ({counts['cold_dirty']} of {counts['cold']}): decode "
            "and "
            "prefill disagree on the same tokens without any restore",
            **counts,
        )
    verdict.because(
        "both_remain",
        "rounding that depends on the batch, and a wrong mask, window, position or state, both remain "
        "possible",
    )


def _equal_rows_undecided(verdict: _Verdict, ranked: Sequence[Hypothesis]) -> None:
    rival = next((h for h in ranked if h.code == "few_row_extend"), None)
    if rival is None:
        return
    verdict.because(
        "equal_m_undecided",
        "extends of few rows happen on hits only, so arithmetic that depends on the number of rows would "
        "look "
        "the same until equal row counts are compared",
    )


def _helper_lines(verdict: _Verdict, results: Mapping[HelperName, Mapping[str, Any]]) -> None:
    for helper, result in results.items():
        tokens, hits = result.get("tokens") or 0, result.get("hits")
        said = f"{helper}: {result.get('status')}"
        if tokens:
            differ = counted(tokens, "token differs", "tokens differ")
            said += f", {result.get('divergent_tokens')} of {differ}, hits {hits}/{result.get('requests')}"
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


def _describe(verdict: _Verdict, signatures: Sequence[Signature]) -> None:
    for signature in signatures:
        whole = signature.whole
        if whole.readings is None:
            continue
        _where(verdict, signature.helper, whole)
        for residue in signature.residues[:3]:
            verdict.because(
                "residue",
                f"{signature.helper}: {residue.sentence} (by chance: {residue.chance:.1g})",
                helper=signature.helper,
                **residue.values,
            )
        for split in signature.splits[:2]:
            verdict.because("split", f"{signature.helper}: {split.sentence}", **split.values)
        if signature.place is not None:
            verdict.because(
                "place",
                f"{signature.helper}: {signature.place.sentence} (by chance: {signature.place.chance:.1g})",
                helper=signature.helper,
                kind=signature.place.kind,
            )


def _where(verdict: _Verdict, helper: str, whole: PathReading) -> None:
    """The three readings of the first divergence, and its shape."""
    readings = whole.readings
    assert readings is not None
    said = (
        f"{helper}: {counted(whole.dirty, 'request')}, first divergence at offset "
        f"{_span(readings.offset)}, position {_span(readings.position)}"
    )
    if readings.from_cached is not None:
        tokens = "token" if readings.from_cached == (1, 1) else "tokens"
        said += f", {_span(readings.from_cached)} {tokens} after the cached prefix"
    verdict.because(
        "where",
        f"{said}; {whole.contiguous_fraction:.0%} of the tokens from there on differ ({whole.shape}), median "
        f"{whole.median_abs_nats:.2g}, largest {whole.max_abs_nats:.2g} nats",
        helper=helper,
        where=whole.where,
        shape=whole.shape,
        first_offset=list(readings.offset),
        first_position=list(readings.position),
        from_cached=None if readings.from_cached is None else list(readings.from_cached),
        contiguous_fraction=whole.contiguous_fraction,
    )


def _span(values: tuple[int, int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]} to {values[1]}"


def _about_prompts(verdict: _Verdict, signature: Signature) -> None:
    sharing = signature.sharing
    hits = signature.hit.requests
    if signature.helper == "match" and hits:
        verdict.because(
            "match_hits",
            f"match: {counted(hits, 'request')} restored a prefix, because {sharing.sharing} prompts share "
            f"one of up to {sharing.longest} tokens with another: judge them as hits",
            hits=hits,
            sharing=sharing.sharing,
            longest=sharing.longest,
        )
    if signature.scoring_hits:
        verdict.because(
            "scoring_not_cold",
            f"{signature.helper}: {counted(signature.scoring_hits, 'request')} restored a prefix in the "
            "scoring arm, too: what both arms restored alike cannot differ",
            helper=signature.helper,
            requests=signature.scoring_hits,
        )


def _sample_size(
    verdict: _Verdict,
    results: Mapping[HelperName, Mapping[str, Any]],
    columns: Mapping[HelperName, HelperColumns],
) -> None:
    warnings = [(part, said) for part in columns.values() if (said := sample_warning(part)) is not None]
    if not warnings:
        return
    part, said = min(warnings, key=lambda item: (item[0].requests, int(item[0].output_len.max(initial=0))))
    verdict.because(
        "few_samples",
        said,
        requests=part.requests,
        tokens_each=int(part.output_len.max(initial=0)),
        helpers=list(results),
    )
