"""The guided path: which step is next, why it matters, what was learned, and the key or command for it.

    for item in where_we_are(GuideFacts(server=server, verdict=verdict)):
        print(item.mark, item.step.title, item.learned)

    ✓ deterministic mode, read back
    ✓ the three helpers, as CI runs them
    ▸ settle condition 1: does any operator depend on the batch?

Steps follow the evidence and not the clock: any of them can be skipped, and a step is done when its question
has an answer, whoever gave it. The text is data: the workbench's panel and `klbench guide` show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION

State = Literal["done", "now", "open", "not_needed"]
_MARKS: dict[State, str] = {"done": "✓", "now": "▸", "open": "·", "not_needed": "–"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `question` it answers, `why` it matters, `how` it is done; `key` in the workbench, `command`
    without it."""

    code: str
    title: str
    question: str
    why: str
    how: str
    key: str
    command: str


STEPS: tuple[Step, ...] = (
    Step(
        "server",
        "a deterministic server, read back",
        "Does the server run as it was asked to?",
        "Without deterministic inference every operator may round differently with every batch, and that "
        "noise "
        "hides all else. Flags can be ignored, overruled or switch each other off: believe what the "
        "server says "
        "of itself, not what was typed.",
        "Start it with --enable-deterministic-inference (klbench does) and look at what is in force: "
        "attention "
        "backend, radix cache, page size, K/V dtype.",
        "@",
        "klbench run --launch MODEL_PATH",
    ),
    Step(
        "helpers",
        "the three helpers, as CI runs them",
        "Which requests differ, and by how much?",
        "match compares decode with a cold prefill; the two cache helpers compare generation behind a "
        "restored "
        "prefix with a cold prefill. A helper that could not run, or hit nothing, has passed nothing. The "
        "mean "
        "hides the tail: look at the maximum and at how many tokens differ at all.",
        "Run 32 requests of 512 tokens. Fewer may miss a rare divergence.",
        "r",
        "klbench run --launch MODEL_PATH --json result.json",
    ),
    Step(
        "condition_1",
        "settle condition 1: batch invariance",
        "Does a token's result depend on which other tokens share its forward?",
        "It is settled first because its noise hides condition 2. Cold requests that differ show it, but "
        "so does a "
        "window that is off by one: small differences from the first decoded token speak for rounding, a "
        "constant "
        "position for a tile, a constant offset for something that decode does after so many steps.",
        "Look at the residues and at the first divergence: absolute, from the prompt's end, from the cached "
        "tokens. Census calls each operator alone with other row counts; the equal-M experiment compares "
        "decode "
        "and a one-token extend with the same rows.",
        "v",
        "klbench census --launch MODEL_PATH",
    ),
    Step(
        "condition_2",
        "settle condition 2: the same function",
        "Do decode, prefill and a restored prefix compute the same function of the same state?",
        "With cold requests clean, a divergence of hits alone points at what was restored. But extends of "
        "few rows "
        "exist on hits only, so arithmetic of few rows looks the same until the restore is tried with a wide "
        "extend.",
        "Judge by each request's cached tokens, not by the helper's name. Try the same restore with "
        "a wide extend, and other page sizes; predict a residue and pad the prompts to it.",
        "v",
        "klbench experiment wide_restore --launch MODEL_PATH",
    ),
    Step(
        "locate",
        "locate the origin",
        "At which operator and position is the divergence born?",
        "The first difference in layer order is not the origin: an operator that reads K/V of earlier rows "
        "inherits theirs. The origin is where every input and the state read are equal and the output "
        "differs.",
        "Capture repeats the same batch with digests of every row, pairs rows by position and proves it, "
        "and names "
        "the operator.",
        "o",
        "klbench locate --launch MODEL_PATH",
    ),
    Step(
        "confirm",
        "confirm it",
        "Does it hold when it is tried to be refuted?",
        "A finding is only probable until the divergence shows under capture settings, capture changes no "
        "logprob, "
        "and a repeat gives the same origin. Repeats with equal bits exclude a race up to a rate; other "
        "bits in "
        "equal batches prove one.",
        "Repeat the run; replay the operator alone with other row counts; change what should not matter "
        "(overlap, "
        "graphs, page size) and compare bits.",
        "o",
        "klbench experiment repeats --launch MODEL_PATH",
    ),
    Step(
        "report",
        "report it",
        "Can somebody else see it?",
        "An answer must leave the terminal with its evidence, what was not checked, and the commands that "
        "repeat "
        "it.",
        "Write the report; after a mend run the same prompts again: a large fault may have hidden a "
        "smaller one.",
        "e",
        "klbench report SESSION",
    ),
)

GLOSSARY: dict[str, str] = {
    "arm": "one pass over the prompts: warming fills the cache, generation generates, scoring scores the "
    "same "
    "tokens in a cold prefill",
    "batch invariance": "a token's result does not depend on how many tokens share its forward, nor on which",
    "bit-equal": "the same float32 bits; two logprobs that print alike may still differ",
    "cached tokens": "how many tokens of a request's prompt came from the radix cache instead of a forward",
    "cold": "a request that restored nothing before it generated",
    "divergence": "a token whose two logprobs are not bit-equal",
    "equal-M": "the same token computed as decode and as a one-token extend, with as many rows in both",
    "extend": "the forward that computes the part of a prompt that was not cached",
    "finding": "an origin with its evidence and grade: confirmed, probable or unknown",
    "floor": "the divergence that remains where prefill and decode are two algorithms; not every model "
    "can reach "
    "zero",
    "hit": "a request that restored a cached prefix",
    "k3": "exp(r) - 1 - r with r = prefill logprob - decode logprob of the sampled token: an estimate of "
    "the KL divergence, in nats",
    "M": "how many rows share one call of an operator",
    "nats": "units of a logarithm to the base e; 1e-9 nats is sglang's gate",
    "offset": "index of a token among the generated ones",
    "origin": "the operator and position where every input and the state read are equal and the output "
    "differs",
    "position": "index of a token in prompt and output together; the row before it scores it",
    "race": "what is read depends on when it was written: equal batches give other bits",
    "residue": "what is left of a length or position divided by a page, chunk, window or tile: the "
    "strongest clue",
    "restore": "taking a prefix's K/V or state from the cache instead of computing it",
    "sliding window": "a layer reads only so many keys back; its edge is a place for faults of one",
    "tile": "keys are summed in blocks of 64 to 256; another block size is another rounding",
}


@dataclass(frozen=True, slots=True)
class GuideFacts:
    """What is known of an investigation; empty where it has not come so far."""

    server: Mapping[str, Any] = field(default_factory=dict)
    verdict: Mapping[str, Any] | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    located: bool = False
    experiments: Sequence[Mapping[str, Any]] = ()
    reported: bool = False


@dataclass(frozen=True, slots=True)
class StepState:
    """How a step stands and what it taught."""

    step: Step
    state: State
    learned: str = ""

    @property
    def mark(self) -> str:
        return _MARKS[self.state]


def where_we_are(facts: GuideFacts) -> tuple[StepState, ...]:
    """Every step with its state; exactly one is `now` unless all are done."""
    answers = {
        "server": _server(facts),
        "helpers": _helpers(facts),
        "condition_1": _condition_1(facts),
        "condition_2": _condition_2(facts),
        "locate": _locate(facts),
        "confirm": _confirm(facts),
        "report": ("done", "the report is written") if facts.reported else ("open", ""),
    }
    states: list[StepState] = []
    reached = False
    for step in STEPS:
        state, learned = answers[step.code]
        if state == "open" and not reached:
            reached, state = True, "now"
        states.append(StepState(step, state, learned))
    return tuple(states)


_Answer = tuple[State, str]


def _server(facts: GuideFacts) -> _Answer:
    if not facts.server:
        return "open", ""
    if facts.server.get("deterministic") is False:
        return "open", "deterministic inference is off"
    parts = [f"attention {facts.server.get('attention_backend')}"]
    parts.append("radix cache on" if facts.server.get("radix_cache") else "radix cache off")
    parts.append(f"page {facts.server.get('page_size')}")
    return "done", ", ".join(parts)


def _helpers(facts: GuideFacts) -> _Answer:
    if facts.verdict is None:
        return "open", ""
    lines = [fact for fact in _evidence(facts) if fact.get("code") == "helper"]
    statuses = [
        f"{line['values'].get('helper')} {line['values'].get('helper_status')}"
        for line in lines
        if isinstance(line.get("values"), Mapping)
    ]
    unanswered = facts.verdict.get("status") == "undecided"
    return ("open" if unanswered else "done"), " · ".join(statuses)


def _condition_1(facts: GuideFacts) -> _Answer:
    if _clean(facts):
        return "done", "no token differs: batch invariance held for all that was compared"
    if facts.verdict is None or facts.verdict.get("status") != "found":
        return "open", ""
    conditions, grade = _judged(facts)
    leading = _leading(facts)
    if BATCH_INVARIANCE in conditions and grade == "confirmed":
        return "done", leading
    if not _cold_dirty(facts):
        return "done", "cold requests are bit-equal: decode and prefill agree without a restore"
    if conditions == [DIFFERENT_FUNCTION] and grade in ("probable", "confirmed"):
        return "done", f"not the rounding of batches: {leading}"
    return "open", leading


def _condition_2(facts: GuideFacts) -> _Answer:
    if _clean(facts):
        return "done", "no token differs: restored and cold prefixes agree"
    if facts.verdict is None or facts.verdict.get("status") != "found":
        return "open", ""
    conditions, grade = _judged(facts)
    if DIFFERENT_FUNCTION in conditions and grade == "confirmed":
        return "done", _leading(facts)
    if conditions == [BATCH_INVARIANCE] and grade == "confirmed":
        hidden = "it is judged again once condition 1 is mended: its noise may hide a fault of state"
        return "not_needed", hidden
    return "open", _leading(facts) if conditions == [DIFFERENT_FUNCTION] else ""


def _locate(facts: GuideFacts) -> _Answer:
    if _clean(facts):
        return "not_needed", "nothing diverges"
    if not facts.located:
        return "open", ""
    origins = [f for f in facts.findings if not f.get("latent")]
    if not origins:
        return "open", "no origin was found"
    first = origins[0]
    return "done", f"{first.get('kind')} in {first.get('module')} ({first.get('grade')})"


def _confirm(facts: GuideFacts) -> _Answer:
    if _clean(facts):
        return "not_needed", "nothing diverges"
    _, grade = _judged(facts)
    if grade == "confirmed":
        return "done", _leading(facts)
    made = [str(outcome.get("text")) for outcome in facts.experiments if outcome.get("text")]
    return "open", made[-1] if made else ""


def _clean(facts: GuideFacts) -> bool:
    return facts.verdict is not None and facts.verdict.get("status") == "none"


def _evidence(facts: GuideFacts) -> list[Mapping[str, Any]]:
    items = (facts.verdict or {}).get("evidence") or ()
    return [item for item in items if isinstance(item, Mapping)]


def _judged(facts: GuideFacts) -> tuple[list[str], str]:
    verdict = facts.verdict or {}
    return [str(name) for name in verdict.get("conditions") or ()], str(verdict.get("grade") or "unknown")


def _leading(facts: GuideFacts) -> str:
    """The first hypothesis in words."""
    hypotheses = (facts.verdict or {}).get("hypotheses") or ()
    for hypothesis in hypotheses:
        if isinstance(hypothesis, Mapping):
            return f"{hypothesis.get('text')} ({hypothesis.get('grade')})"
    return ""


def _cold_dirty(facts: GuideFacts) -> bool:
    """Whether cold requests differ, or none was compared; the evidence carries the counts."""
    for item in _evidence(facts):
        values = item.get("values")
        if isinstance(values, Mapping) and "cold_dirty" in values:
            return bool(values["cold_dirty"]) or not values.get("cold")
    return True
