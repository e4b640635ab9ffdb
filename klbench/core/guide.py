"""The guided path: which step is next, why it matters, what was learned, and the key or command for it.

    for item in where_we_are(GuideFacts(server=server, verdict=verdict)):
        print(item.mark, item.step.title, item.learned)

    ✓ deterministic mode, read back
    ✓ the three helpers, as CI runs them
    ▸ settle condition 1: does any operator depend on the batch?

Steps follow the evidence and not the clock: any of them can be skipped, and a step is done when its question
has an answer, whoever gave it. The text is data (guide_text.py): the workbench's panel and `klbench guide`
show the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from klbench.core.experiments import CATALOGUE
from klbench.core.guide_text import GLOSSARY, STEPS, Step
from klbench.core.hypotheses import BATCH_INVARIANCE, DIFFERENT_FUNCTION

__all__ = ["GLOSSARY", "STEPS", "GuideFacts", "Step", "StepState", "terms_in", "where_we_are"]

State = Literal["done", "now", "open", "not_needed", "skipped"]
_MARKS: dict[State, str] = {"done": "✓", "now": "▸", "open": "·", "not_needed": "–", "skipped": "»"}


@dataclass(frozen=True, slots=True)
class GuideFacts:
    """What is known of an investigation; empty where it has not come so far."""

    server: Mapping[str, Any] = field(default_factory=dict)
    verdict: Mapping[str, Any] | None = None
    findings: Sequence[Mapping[str, Any]] = ()
    located: bool = False
    experiments: Sequence[Mapping[str, Any]] = ()
    reported: bool = False
    skipped: Collection[str] = ()
    """Codes of steps that the user passed over."""
    doing: str = ""
    """The kind of the job in progress: what a step asks for may be under way."""


@dataclass(frozen=True, slots=True)
class StepState:
    """How a step stands, what it taught, and what to do about it: `todo` with the workbench's `key`, and the
    `way` there where pressing that key would not do."""

    step: Step
    state: State
    learned: str = ""
    todo: str = ""
    key: str = ""
    way: str = ""

    @property
    def mark(self) -> str:
        return _MARKS[self.state]

    @property
    def command(self) -> str:
        """What does it without the workbench: the step's own command, or the capture that settles it."""
        return next((step.command for step in STEPS if self.key == step.key == "o"), self.step.command)


def where_we_are(facts: GuideFacts) -> tuple[StepState, ...]:
    """Every step with its state; exactly one is `now` unless all are done or passed over."""
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
        if state == "open" and step.code in facts.skipped:
            state = "skipped"
        if state == "open" and not reached:
            reached, state = True, "now"
        todo, key = _todo(step, facts)
        states.append(StepState(step, state, learned, todo, key))
    return tuple(states)


EVERYWHERE = frozenset({"fault", "operator", "request", "run", "runner", "server", "session", "trace"})
"""Words of the glossary that every step uses; the list of all explains them, not each step."""


def terms_in(text: str) -> dict[str, str]:
    """The words of the glossary that occur in `text`, without those that are everywhere, with their meanings;
    longest words first."""
    found: dict[str, str] = {}
    rest = text
    for word in sorted(GLOSSARY.keys() - EVERYWHERE, key=lambda word: (-len(word), word)):
        pattern = re.compile(rf"(?<!\w){re.escape(word)}s?(?!\w)", 0 if word == "M" else re.IGNORECASE)
        if pattern.search(rest):
            found[word] = GLOSSARY[word]
            # "wide extend" is not "extend".
            rest = pattern.sub(" ", rest)
    return found


_Answer = tuple[State, str]
_UNDER_WAY: dict[str, tuple[str, str, str]] = {
    "launch": ("server", "wait: the server starts, its log tells how far it is", "l"),
    "relaunch": ("server", "wait: the server starts, its log tells how far it is", "l"),
    "run": ("helpers", "wait: the helpers run, the requests of each appear as it ends", "l"),
    "locate": ("locate", "wait: the arms are repeated and captured", "o"),
    "census": ("condition_1", "wait: the operators are called again", "M"),
    "report": ("report", "wait: the report is written", "l"),
}
"""Job: the step that it does, what is to be said, and the key that shows it."""
_DECIDED_BY_EXPERIMENT = ("condition_1", "condition_2", "confirm")
_PROPOSED = (*_DECIDED_BY_EXPERIMENT, "locate")
"""Steps whose question is answered by what the verdict proposes: an origin settles a condition, too."""
_KEYS = {"locate": "o", "census": "M", "run": "r"}
"""By the verdict's code of a step: the key that does it. Experiments have X, `v` explains all else."""


def _todo(step: Step, facts: GuideFacts) -> tuple[str, str]:
    """What the step asks for now, and its key: the verdict's first proposal that can be made, where it has
    one."""
    under_way = _UNDER_WAY.get(facts.doing)
    if under_way is not None and under_way[0] == step.code:
        return under_way[1:]
    if step.code in _DECIDED_BY_EXPERIMENT and facts.doing == "experiment":
        return "wait: an experiment is made", "X"
    if step.code in _PROPOSED and (proposed := _proposed(facts)) is not None:
        # What settles this step may be what another one asks for.
        return under_way[1:] if under_way is not None and under_way[2] == proposed[1] else proposed
    if step.code == "helpers":
        for item in _mappings((facts.verdict or {}).get("next")):
            if item.get("code") == "answer_helper":
                return str(item.get("text") or ""), "v"
    if step.code == "report" and _clean(facts):
        return "write the report: it says what was compared, and what no request exercised", step.key
    return step.how, step.key


def _proposed(facts: GuideFacts) -> tuple[str, str] | None:
    """The verdict's first next step that can be made, and its key; a capture that found no origin is not
    proposed again."""
    for item in _mappings((facts.verdict or {}).get("next")):
        code, values = str(item.get("code") or ""), item.get("values")
        impossible = isinstance(values, Mapping) and values.get("not_possible")
        if impossible or (code == "locate" and facts.located) or not item.get("text"):
            continue
        return str(item["text"]), "X" if code in CATALOGUE else _KEYS.get(code, "v")
    return None


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
        return "done", ": ".join(part for part in ("not the rounding of batches", leading) if part)
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


def _mappings(items: object) -> list[Mapping[str, Any]]:
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list | tuple) else []


def _evidence(facts: GuideFacts) -> list[Mapping[str, Any]]:
    return _mappings((facts.verdict or {}).get("evidence"))


def _judged(facts: GuideFacts) -> tuple[list[str], str]:
    verdict = facts.verdict or {}
    return [str(name) for name in verdict.get("conditions") or ()], str(verdict.get("grade") or "unknown")


def _leading(facts: GuideFacts) -> str:
    """The first hypothesis in words."""
    for hypothesis in _mappings((facts.verdict or {}).get("hypotheses")):
        return f"{hypothesis.get('text')} ({hypothesis.get('grade')})"
    return ""


def _cold_dirty(facts: GuideFacts) -> bool:
    """Whether cold requests differ, or none was compared; the evidence carries the counts."""
    for item in _evidence(facts):
        values = item.get("values")
        if isinstance(values, Mapping) and "cold_dirty" in values:
            return bool(values["cold_dirty"]) or not values.get("cold")
    return True
