"""What a reader of a result must not take for settled: what did not run, was not reached, or stayed open."""

from __future__ import annotations

from klbench.core.columns import HELPERS
from klbench.core.experiments import NO_EFFECT, NOT_COMPARABLE, NOT_POSSIBLE
from klbench.core.text import counted
from klbench.session.documents import helper_object, not_exercised, verdict_items
from klbench.session.state import LocatedState, SessionState

_OTHERS_UNSEEN = (
    "Others may use an attached server. klbench's plugin shows each request of theirs in a batch with ours; "
    "without it one that ran while as many of ours had ended is not seen."
)
"""engine/others.py says why."""


def not_checked(state: SessionState) -> list[str]:
    """What a reader must not take for settled, one sentence each."""
    damage = [f"{state.damage.in_words}."] if state.damage.count else []
    run = state.run
    if run is None:
        return [*damage, "No helper was run."]
    ran = {helper.helper for helper in run.helpers}
    notes = [*damage, *(f"{name} was not asked for." for name in HELPERS if name not in ran)]
    for helper in run.helpers:
        result = helper_object(helper)
        if result["status"] not in ("clean", "diverged"):
            notes.append(
                f"{helper.helper} is {result['status']}: {result.get('reason') or 'no reason given'}."
            )
        if dropped := result.get("dropped"):
            notes.append(f"{helper.helper} left out {counted(dropped, 'request')} that missed the cache.")
    count = run.prompts.get("count")
    if isinstance(count, int) and count < 32:
        notes.append(
            f"{counted(count, 'prompt is', 'prompts are')} fewer than the 32 of sglang's own tests: rare "
            "faults may not show."
        )
    notes += [_sentence(item["text"]) for item in not_exercised(run.verdict)]
    if state.runner.target.get("kind") == "url":
        notes.append(_OTHERS_UNSEEN)
    diverged = [helper.helper for helper in run.helpers if helper.status == "diverged"]
    located_here = state.located_of(run)
    if diverged and not located_here:
        notes.append("The origin of the divergence was not located.")
    for located in located_here:
        notes += _open_questions(located)
    if not state.server.facts.get("deterministic", True):
        notes.append("The server does not run in deterministic mode: differences of rounding are expected.")
    for made in state.experiments_of(run):
        if made.result.get("outcome") in (NOT_POSSIBLE, NOT_COMPARABLE, NO_EFFECT):
            why = made.result.get("text") or "no reason given"
            notes.append(f"The experiment {made.name} on {made.helper} answered nothing: {why}.")
    return notes + [f"Not tried: {item.get('text')}." for item in verdict_items(run.verdict, "next")]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _open_questions(located: LocatedState) -> list[str]:
    notes = []
    for finding in located.result.get("findings", []):
        kinds = finding.get("kinds") or []
        if len(kinds) > 1:
            notes.append(
                f"Between {' and '.join(map(str, kinds))} the evidence at {finding.get('module')} "
                "does not decide."
            )
        if finding.get("grade") != "confirmed":
            notes.append(f"The finding at {finding.get('module')} is {finding.get('grade')}, not confirmed.")
    said = located.result.get("notes")
    notes += [str(note) for note in said] if isinstance(said, list) else []
    masked = located.result.get("masked") or []
    if masked:
        lie = counted(len(masked), "operator lies", "operators lie")
        notes.append(f"{lie} behind an origin and could not be judged.")
    return notes
