"""How right the answers on planted faults are: each answer against what is known to be true.

    truth = Truth(conditions={"different_function"}, dirty={"prefill_cache_hit"}, origins=(origin,))
    judge(truth, answer).marks      {"condition": "right", "helpers": "right", "operator": "right", ...}

A mark is `right`, `wrong`, `undecided` (what is true is among what the evidence leaves, and an experiment
that would decide it is named), `no_rule` (any answer would do, so none can be wrong and none counts as right)
or `none` (nothing of the kind is asked). One wrong mark makes the case wrong, and so does an accusation of
anything that was not planted. What did not fire is `did_not_fire`, never a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from klbench.core.hypotheses import CONDITIONS

Mark = Literal["right", "wrong", "undecided", "no_rule", "none"]
MARKS = ("condition", "helpers", "operator", "layer", "position", "kind")
"""What is judged of each case, in the order of the table."""
ANSWERS = ("right", "undecided", "did_not_fire", "wrong", "error")

_NOT_AN_EXPERIMENT = frozenset({"locate", "run", "answer_helper"})


@dataclass(frozen=True, slots=True)
class First:
    """The first row position that is right; None where the truth has no rule for it."""

    position: int | None = None

    def allows(self, found: int) -> bool:
        return self.position is None or found == self.position

    def __str__(self) -> str:
        return "any" if self.position is None else str(self.position)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a planted fault begins. `module` is its path, for a gap `A -> B`."""

    fault: str
    module: str
    layer: int | None
    kinds: tuple[str, ...]
    first: First = First()


@dataclass(frozen=True, slots=True)
class Truth:
    """What must be said of a run with planted faults. `masked` are modules that must be listed as masked.

    `requests` are those of the located helper that must diverge, all others at exactly zero; None where the
    fault does not choose. `by_chance`: which of the `dirty` helpers a random fault reaches is not known
    before, only that it reaches one.
    """

    conditions: frozenset[str]
    dirty: frozenset[str]
    origins: tuple[Origin, ...]
    masked: tuple[str, ...] = ()
    requests: frozenset[int] | None = None
    by_chance: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What klbench said: statuses by helper, the verdict of klbench.run/1, findings and masked operators of
    klbench.locate/1; `refusal` why nothing was located, where a capture gave its reason."""

    statuses: Mapping[str, str]
    verdict: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]] = ()
    masked: Sequence[Mapping[str, Any]] = ()
    refusal: str = ""
    divergent: frozenset[int] = frozenset()
    """The requests of the located helper that diverge."""

    @property
    def dirty(self) -> frozenset[str]:
        return frozenset(name for name, status in self.statuses.items() if status == "diverged")

    @property
    def origins(self) -> list[Mapping[str, Any]]:
        """The findings that count."""
        return [finding for finding in self.findings if not finding.get("latent")]

    @property
    def deciding(self) -> tuple[str, ...]:
        """The experiments that the verdict names as the next ones."""
        codes = (str(step.get("code")) for step in self.verdict.get("next") or ())
        return tuple(dict.fromkeys(code for code in codes if code not in _NOT_AN_EXPERIMENT))


@dataclass(frozen=True, slots=True)
class Judged:
    """The marks of one case; `why` says what is not right."""

    answer: str
    marks: Mapping[str, Mark]
    why: str
    grade: str
    """Of the condition."""
    deciding: tuple[str, ...]
    """The experiments named, where something is undecided."""


def judge(truth: Truth, answer: Answer) -> Judged:
    """Compares an answer with the truth."""
    marks: dict[str, Mark] = dict.fromkeys(MARKS, "none")
    reasons: list[str] = []

    def mark(name: str, given: Mark, reason: str = "") -> None:
        marks[name] = _worse(marks[name], given)
        if reason:
            reasons.append(reason)

    mark("helpers", *_helpers(truth, answer))
    if answer.dirty or answer.findings:
        mark("condition", *_condition(truth, answer))
        for origin in truth.origins:
            for name, given, reason in _origin(origin, answer):
                mark(name, given, reason)
        accused = [f for f in answer.origins if not any(_same(f["module"], o.module) for o in truth.origins)]
        # What lies behind a masked fault's place belongs to that fault.
        accused = [f for f in accused if not any(_same(f["module"], module) for module in truth.masked)]
        if accused:
            mark("operator", "wrong", "accused too: " + ", ".join(map(_place, accused)))
        for module in truth.masked:
            if not any(_same(str(entry.get("module")), module) for entry in answer.masked):
                mark("operator", "wrong", f"{module} is not listed as masked")
    given_marks = set(marks.values())
    worst = "wrong" if "wrong" in given_marks else "undecided" if "undecided" in given_marks else "right"
    deciding = answer.deciding if worst == "undecided" else ()
    if worst == "undecided" and not deciding:
        worst = "wrong"
        reasons.append("undecided, and no experiment that would decide it is named")
    return Judged(worst, marks, "; ".join(reasons), str(answer.verdict.get("grade") or "unknown"), deciding)


def _worse(one: Mark, other: Mark) -> Mark:
    order: tuple[Mark, ...] = ("none", "no_rule", "right", "undecided", "wrong")
    return max(one, other, key=order.index)


def _helpers(truth: Truth, answer: Answer) -> tuple[Mark, str]:
    ran = {name for name, status in answer.statuses.items() if status not in ("not_run", "inconclusive")}
    if failed := sorted(name for name, status in answer.statuses.items() if status == "error"):
        return "wrong", f"failed: {', '.join(failed)}"
    missed, accused = (truth.dirty & ran) - answer.dirty, answer.dirty - truth.dirty
    # Whichever it reached is right: that can be judged only by those that it cannot reach.
    any_is_right = truth.by_chance and bool(answer.dirty) and truth.dirty >= ran
    if truth.by_chance and answer.dirty:
        missed = frozenset()
    said = []
    if missed:
        said.append(f"clean though the fault reaches them: {', '.join(sorted(missed))}")
    if accused:
        said.append(f"diverged though the fault does not reach them: {', '.join(sorted(accused))}")
    if truth.requests is not None and truth.requests != answer.divergent:
        reached, found = (sorted(requests) for requests in (truth.requests, answer.divergent))
        said.append(f"requests {found} diverge, the fault reaches {reached}")
    if said:
        return "wrong", "; ".join(said)
    return "no_rule" if any_is_right and truth.requests is None else "right", ""


def _condition(truth: Truth, answer: Answer) -> tuple[Mark, str]:
    named = [str(code) for code in answer.verdict.get("conditions") or () if code in CONDITIONS]
    said = " and ".join(named) or "no condition"
    wanted = " and ".join(sorted(truth.conditions))
    if truth.conditions == set(named) and answer.verdict.get("grade") != "unknown":
        return "right", ""
    if truth.conditions <= set(named):
        return "undecided", f"the condition may be {said}; it is {wanted}"
    return "wrong", f"the condition is said to be {said}; it is {wanted}"


def _origin(origin: Origin, answer: Answer) -> Iterable[tuple[str, Mark, str]]:
    """(mark's name, mark, reason) of what was said about one planted fault."""
    found = answer.origins
    speaking = next((finding for finding in found if _same(finding["module"], origin.module)), None)
    if speaking is None:
        given: Mark = "undecided" if answer.refusal and not found else "wrong"
        reason = answer.refusal if given == "undecided" else f"nothing speaks of {origin.module}"
        if found and given == "wrong":
            reason += ", but of " + ", ".join(map(_place, found))
        yield "operator", given, reason
        layers = {finding.get("layer") for finding in found}
        right = bool(found) and origin.layer in layers
        yield "layer", _if_ruled(origin.layer, "right" if right else given), ""
        yield "position", _if_ruled(origin.first.position, given), ""
        yield "kind", given, ""
        return
    yield "operator", "right", ""
    if speaking.get("layer") == origin.layer:
        yield "layer", _if_ruled(origin.layer, "right"), ""
    else:
        yield "layer", "wrong", f"layer {speaking.get('layer')} is named"
    first = int(speaking["positions"]["first"])
    if origin.first.allows(first):
        yield "position", _if_ruled(origin.first.position, "right"), ""
    else:
        yield "position", "wrong", f"{origin.module} begins at {first}, not {origin.first}"
    yield _kind(origin, speaking)


def _if_ruled(truth: int | None, given: Mark) -> Mark:
    """`given` where the truth has a rule for it: a layer of a module in one, a first row that is known."""
    return "no_rule" if truth is None else given


def _kind(origin: Origin, finding: Mapping[str, Any]) -> tuple[str, Mark, str]:
    kinds = [str(kind) for kind in finding.get("kinds") or (finding.get("kind"),)]
    if len(kinds) > 1 or kinds[0] in ("not_observed", "not_aligned"):
        possible = bool(set(kinds) & {*origin.kinds, "not_observed", "not_aligned"})
        why = f"{origin.module} may be {', '.join(kinds)}"
        return "kind", "undecided" if possible else "wrong", why
    if kinds[0] in origin.kinds:
        return "kind", "right", ""
    return "kind", "wrong", f"{origin.module} is called {kinds[0]}, not {' or '.join(origin.kinds)}"


def _place(finding: Mapping[str, Any]) -> str:
    return f"{finding.get('kind')} {finding.get('module')} at {finding['positions']['first']}"


def _same(found: str, true: str) -> bool:
    """Whether two paths name one module; sglang's own name of the model in front does not count."""
    return [part.strip().removeprefix("model.") for part in found.split("->")] == [
        part.strip().removeprefix("model.") for part in true.split("->")
    ]
