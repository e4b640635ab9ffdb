"""What the experiments' screen says: pure functions of the session's state.

A line of the matrix is one experiment of the catalogue: which outcomes it can have, which one it had, whether
it is running or cannot be made here, and what it costs by this session's own measured times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klbench.core.columns import HELPERS
from klbench.core.experiments import (
    CATALOGUE,
    DIFFERS,
    MOVED,
    NO_EFFECT,
    NOT_COMPARABLE,
    NOT_POSSIBLE,
    PARTLY,
    PREDICTED,
    REFUTED,
    RELAUNCH_ASKS_S,
    SAME,
    VANISHED,
    make_plan,
    why_not,
)
from klbench.core.text import counted, elapsed
from klbench.session.state import ExperimentState, SessionState
from klbench.tui.actions import key_of
from klbench.tui.verdict_words import Paragraph, mappings, not_possible

OUTCOMES: tuple[tuple[str, str], ...] = (
    (SAME, "same"),
    (DIFFERS, "differs"),
    (MOVED, "moved"),
    (VANISHED, "gone"),
)
"""The columns of the matrix."""
_WORDS = {
    SAME: "same bits",
    DIFFERS: "differs",
    MOVED: "moved",
    VANISHED: "gone",
    NOT_POSSIBLE: "not possible",
    NO_EFFECT: "no effect",
    NOT_COMPARABLE: "no answer",
    PREDICTED: "as predicted",
    PARTLY: "in part",
    REFUTED: "refuted",
}


@dataclass(frozen=True, slots=True)
class MatrixLine:
    """One experiment as it stands. `state` is "not made", "running", or how it ended, in words."""

    name: str
    state: str
    made: ExperimentState | None
    impossible: str | None
    """Why it cannot be made on this server."""
    runs: int
    launches: int
    estimate_s: float | None
    """None where a launch or a run of the helper was never measured here."""

    @property
    def outcome(self) -> str | None:
        return str(self.made.result.get("outcome")) if self.made is not None else None

    def cell(self, outcome: str) -> str:
        """● for the outcome that it had, · for one that it can have, blank for one that it cannot."""
        if self.outcome == outcome:
            return "●"
        return "·" if outcome in CATALOGUE[self.name].outcomes and self.impossible is None else ""


def helper_to_try(state: SessionState) -> str:
    """The helper that experiments repeat: the first diverged one, else match."""
    helpers = state.run.helpers if state.run is not None else ()
    diverged = [helper.helper for helper in helpers if helper.status == "diverged"]
    return next((name for name in HELPERS if name in diverged), "match")


_NUMBERS = ("page_size", "chunked_prefill_size", "tp_size")


def facts_of(state: SessionState) -> dict[str, Any]:
    """What the server says of itself, without what is not of its kind: a session may come from elsewhere."""
    facts = {
        name: value
        for name, value in state.server.facts.items()
        if name not in _NUMBERS or (isinstance(value, int) and not isinstance(value, bool))
    }
    if not isinstance(facts.get("architectures"), list | tuple):
        facts["architectures"] = []
    return facts


def pass_s(state: SessionState) -> float | None:
    """What one run of that helper took."""
    found = state.run.helper(helper_to_try(state)) if state.run is not None else None
    return found.elapsed_s if found is not None else None


def matrix(state: SessionState) -> list[MatrixLine]:
    """Every experiment of the catalogue, in its order."""
    made = {one.name: one for one in state.experiments_of(state.run)}
    facts, helper = facts_of(state), helper_to_try(state)
    running = running_experiment(state)
    lines = []
    for name in CATALOGUE:
        one = made.get(name)
        reason = why_not(name, facts, helper) if state.server.facts else None
        if one is not None and one.result.get("outcome") == NOT_POSSIBLE:
            reason = str(one.result.get("text") or "").removeprefix("not possible here: ")
        plan = make_plan([name], facts, helper=helper, launch_s=state.server.launch_s, pass_s=pass_s(state))
        if name == running:
            said = "running"
        elif one is not None:
            said = _WORDS.get(str(one.result.get("outcome")), str(one.result.get("outcome")))
        else:
            said = "not possible" if reason is not None else "not made"
        runs = sum(step.passes for step in plan.steps)
        lines.append(MatrixLine(name, said, one, reason, runs, plan.launches, plan.estimate_s))
    return lines


def proposed(state: SessionState) -> str | None:
    """The experiment that the verdict proposes next, where it can be made here."""
    verdict = (state.run.verdict if state.run is not None else None) or {}
    for step in mappings(verdict.get("next")):
        if step.get("code") in CATALOGUE and not_possible(step) is None:
            return str(step["code"])
    return None


def running_experiment(state: SessionState) -> str | None:
    """The experiment whose passes are made now."""
    job = state.job
    if job is None or job.kind != "experiment":
        return None
    name = job.phase.partition(",")[0]
    return name if name in CATALOGUE else None


def plan_line(state: SessionState, marked: Collection[str]) -> str:
    """What the marked experiments cost together; a configuration that several need is started once."""
    if not marked:
        mark, plan_key, make = key_of("mark_experiment"), key_of("make_plan"), key_of("make")
        return f"{mark} marks, {plan_key} makes all that are marked, {make} the one under the cursor"
    names = [name for name in CATALOGUE if name in marked]
    launch_s = state.server.launch_s
    plan = make_plan(
        names, facts_of(state), helper=helper_to_try(state), launch_s=launch_s, pass_s=pass_s(state)
    )
    runs = sum(step.passes for step in plan.steps)
    words = [
        f"{len(names) - len(plan.impossible)} marked",
        f"{counted(runs, 'run')} of {helper_to_try(state)}",
    ]
    words.append(f"{plan.launches or 'no'} {'relaunch' if plan.launches == 1 else 'relaunches'}")
    if plan.estimate_s is not None:
        words.append(f"about {elapsed(plan.estimate_s)}")
    if plan.launches and launch_s:
        took = f"a launch took {elapsed(launch_s)}"
        asks = plan.launches * launch_s > RELAUNCH_ASKS_S
        words.append(f"{took}, so it asks first" if asks else took)
    return "plan: " + " · ".join(words) + f" · {key_of('make_plan')} makes it"


def reading(line: MatrixLine, plan: Mapping[str, Any]) -> list[Paragraph]:
    """What the experiment asks, what it found and what that means, or what each outcome would mean."""
    experiment = CATALOGUE[line.name]
    found: list[Paragraph] = [("", f"{experiment.title}: {experiment.question}")]
    predictions = plan.get("predictions")
    prediction = predictions.get(line.name) if isinstance(predictions, Mapping) else None
    if line.made is not None and line.outcome != NOT_POSSIBLE:
        values = line.made.result.get("values")
        if isinstance(values, Mapping) and values.get("prediction"):
            prediction = values["prediction"]
        found += [("  predicted: ", str(prediction))] if prediction else []
        took = elapsed(line.made.elapsed_s)
        found.append(("  ● ", f"{line.made.result.get('text')} ({line.made.helper}, {took})"))
        found.append(("  = ", str(line.made.result.get("meaning") or "it decides nothing by itself")))
        return found
    if line.impossible is not None:
        return [*found, ("  – ", f"not possible here: {line.impossible}")]
    if line.name == "pad":
        hint = (
            f"the striking residue is taken; on the residues' screen ({key_of('residues')}) {key_of('pad')} "
            "takes the one under the cursor"
        )
        found.append(("  ", hint))
    found += [("  predicted: ", str(prediction))] if prediction else []
    cost = f"{counted(line.runs, 'run')} of the helper"
    if line.launches:
        cost += f", {line.launches} {'relaunch' if line.launches == 1 else 'relaunches'}"
    about = f", about {elapsed(line.estimate_s)}" if line.estimate_s is not None else ""
    found.append(("  costs ", cost + about))
    found += [(f"  · {_WORDS.get(name, name)}: ", meaning) for name, meaning in experiment.outcomes.items()]
    return found


def job_lines(state: SessionState) -> Sequence[str]:
    """What the runner asks, or how far it is."""
    if state.question is not None:
        agree = f"{key_of('agree')} agrees, {key_of('cancel')} cancels."
        return [f"The runner asks to {state.question.what}: {state.question.why}. {agree}"]
    job = state.job
    if job is not None and job.kind == "experiment":
        part = f" ({job.done + 1} of {job.total})" if job.total else ""
        return [
            f"Running {job.phase or job.title}{part}. {key_of('cancel')} cancels; what was found is kept."
        ]
    return []
