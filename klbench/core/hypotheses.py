"""Explanations of a divergence, ranked, each with what speaks for and against it and what would decide it.

    for hypothesis in rank(explain(scene)):
        hypothesis.code, hypothesis.conditions, hypothesis.grade, hypothesis.next

An explanation is `probable` only where something speaks for it that its rivals do not explain; a run alone
never makes one `confirmed` (settled.py does, from findings and experiments). Which explanations there are:
explanations.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klbench.core.experiments import CATALOGUE, cost, cost_words, why_not
from klbench.core.scene import Fact

BATCH_INVARIANCE = "batch_invariance"
DIFFERENT_FUNCTION = "different_function"
RACE = "race"
CONDITIONS = (BATCH_INVARIANCE, DIFFERENT_FUNCTION, RACE)
GRADES = ("confirmed", "probable", "unknown")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation. `weight` orders those of one grade; `next` is the experiment that would decide it."""

    code: str
    text: str
    conditions: tuple[str, ...]
    grade: str
    weight: float
    speaks_for: tuple[Fact, ...]
    speaks_against: tuple[Fact, ...]
    next: str

    def as_dict(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The object in `hypotheses` of a verdict."""
        return {
            "code": self.code,
            "text": self.text,
            "conditions": list(self.conditions),
            "grade": self.grade,
            "for": [fact.as_dict() for fact in self.speaks_for],
            "against": [fact.as_dict() for fact in self.speaks_against],
            "next": next_step(self.next, server),
        }

    def with_for(self, fact: Fact) -> Hypothesis:
        return replace(self, speaks_for=(*self.speaks_for, fact))

    def with_against(self, fact: Fact) -> Hypothesis:
        return replace(self, speaks_against=(*self.speaks_against, fact))


def rank(hypotheses: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    """The likeliest first: by grade, then by weight."""
    return tuple(sorted(hypotheses, key=lambda h: (GRADES.index(h.grade), -h.weight)))


def conditions_of(hypotheses: Sequence[Hypothesis]) -> tuple[list[str], str]:
    """(conditions, grade) of the best grade that any of them has."""
    if not hypotheses:
        return [], "unknown"
    best = min((h.grade for h in hypotheses), key=GRADES.index)
    graded = [h for h in hypotheses if h.grade == best]
    named = {condition for h in graded for condition in h.conditions}
    moved = any({RACE, DIFFERENT_FUNCTION} <= {*h.conditions} for h in graded)
    if best == "unknown" and not moved:
        # A race that nothing speaks for is an experiment worth making, not a condition that was found.
        named -= {RACE} if named != {RACE} else set()
    return [condition for condition in CONDITIONS if condition in named], best


_STEPS: dict[str, str] = {
    "locate": "locate the origin",
    "census": "call each operator alone at several row counts to see which one is not invariant",
    "deterministic": "settle condition 1 first: start the server with --enable-deterministic-inference",
    "run_match": "run match, whose requests restore nothing",
    "control": "compare with a control on the same server: hits may not differ more than match does",
    "cold_chunks": "run again with -- --chunked-prefill-size 128, so that cold requests extend a prefix "
    "of their "
    "own: where those are clean and hits are not, only the restore is left",
    "pool": "run again with a larger K/V pool (-- --max-total-tokens N), so that no request is retracted: "
    "what still diverges has another cause",
}
_WORDS: dict[str, str] = {
    "equal_m": "compare the same token as decode and as a one-token extend on the same cached prefix: the "
    "row counts are equal, so what still differs is another function, or kernels that divide the keys in two "
    "ways",
    "wide_restore": "restore the same prefixes with a longer prompt behind them, so that the extend has "
    "many rows: "
    "a wrong restore still shows, arithmetic of few rows does not",
    "alone": "run one divergent request alone: what needs its batch vanishes",
    "repeats": "repeat the run: a race moves, logic and arithmetic do not",
    "pad": "pad all prompts to the residue and to another, predicted before: the divergence must follow",
}


def next_step(code: str, server: Mapping[str, Any]) -> dict[str, Any]:
    """A step with its text; an experiment with its cost, or with why it is not possible here."""
    if code not in CATALOGUE:
        return {"code": code, "text": _STEPS[code], "values": {}}
    values: dict[str, Any] = {"experiment": code, "cost": cost(code, server)}
    text = _WORDS.get(code) or f"{CATALOGUE[code].title}: {CATALOGUE[code].question}"
    if (reason := why_not(code, server)) is not None:
        values["not_possible"] = reason
        return {"code": code, "text": f"{text} (not possible on this server: {reason})", "values": values}
    return {"code": code, "text": f"{text} ({cost_words(values['cost'])})", "values": values}
