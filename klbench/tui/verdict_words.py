"""What the verdict screen says, as plain text: pure functions of the latest run and its server.

    RUN 1 · found · confirmed
      1 two different computations (condition 2)

Untrusted text passes `visible` where it is drawn. A paragraph is (mark, text): the mark stands before its
first line, the others begin under the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from klbench.core.experiments import CATALOGUE
from klbench.core.text import cell_width, kl, visible, wrap
from klbench.core.verdict_words import condition_words
from klbench.session.documents import missed_lines
from klbench.session.state import HelperState, RunState, ServerState
from klbench.tui.actions import key_of

Paragraph = tuple[str, str]

_CONDITION_NUMBERS = {"batch_invariance": "1", "different_function": "2", "race": "race"}
_COMMANDS = {
    "deterministic": "klbench run --launch MODEL_PATH   (deterministic unless --no-deterministic)",
    "control": "klbench compare CONTROL_SESSION THIS_SESSION",
    "cold_chunks": "klbench run --launch MODEL_PATH -- --chunked-prefill-size 128",
    "pool": "klbench run --launch MODEL_PATH -- --max-total-tokens N",
}
"""Steps that the workbench cannot do on the server at hand, as commands."""


def mappings(items: object) -> list[Mapping[str, Any]]:
    """The mappings among `items`, which may be anything."""
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list | tuple) else []


def hypotheses_of(run: RunState | None) -> list[Mapping[str, Any]]:
    """The verdict's hypotheses, the likeliest first."""
    return mappings((run.verdict or {}).get("hypotheses")) if run is not None else []


def condition_numbers(names: object) -> str:
    """`1`, `2`, `1 2`, `race`: the conditions that an explanation would violate."""
    known = names if isinstance(names, list | tuple) else ()
    return " ".join(_CONDITION_NUMBERS.get(str(name), str(name)) for name in known)


def summary_lines(run: RunState | None) -> list[str]:
    """The verdict itself: status, grade, and the conditions as a list."""
    if run is not None and run.verdict is None and run.will_miss:
        return [f" RUN {run.number} · no verdict before its end", "   what it will not exercise stands below"]
    if run is None or run.verdict is None:
        if run is not None and not run.ended:
            return [f" RUN {run.number} · no verdict yet: it comes with the end of the run"]
        run_them = f"Run the helpers: {key_of('run')} on the main screen."
        return [f" No run has ended yet, so there is no verdict. {run_them}"]
    verdict = run.verdict
    status, grade = str(verdict.get("status", "?")), str(verdict.get("grade", "?"))
    conditions = [str(name) for name in verdict.get("conditions") or ()]
    shown = "no divergence" if status == "none" else status
    head = f" RUN {run.number} · {shown.upper()} · grade {grade}"
    if status == "none":
        return [head, "   no token differs: nothing violates either condition in what was compared"]
    if not conditions:
        return [head, f"   no condition is blamed: {what_to_run(verdict)}"]
    return [head, *(f"   ▸ {condition_words(name)}" for name in conditions)]


def what_to_run(verdict: Mapping[str, Any]) -> str:
    """The first next step of a verdict that is undecided."""
    steps = mappings(verdict.get("next"))
    return f"next, {steps[0].get('text')}" if steps else "run the three helpers"


def next_of(hypothesis: Mapping[str, Any]) -> Mapping[str, Any]:
    """The step that would decide the hypothesis, {} where it names none."""
    step = hypothesis.get("next")
    return step if isinstance(step, Mapping) else {}


def not_possible(step: Mapping[str, Any]) -> str | None:
    """Why the step cannot be made on this server, or None."""
    values = step.get("values")
    reason = values.get("not_possible") if isinstance(values, Mapping) else None
    return str(reason) if reason else None


def how_to(step: Mapping[str, Any], key: str) -> str:
    """How the step is made: the key that makes it here, or the command, or why it cannot be made."""
    code = str(step.get("code") or "")
    if (reason := not_possible(step)) is not None:
        return f"not possible here: {reason}"
    if code == "locate":
        return f"press {key_of('locate')}"
    if code in _COMMANDS:
        return f"it needs another server: {_COMMANDS[code]}"
    if code in CATALOGUE or code in ("run_match", "census"):
        return f"press {key}"
    return ""


def _texts(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the facts say, each sentence once: several requests give the same evidence in the same words."""
    times = Counter(str(fact.get("text") or "") for fact in facts)
    return [text if count == 1 else f"{text} ({count} times)" for text, count in times.items()]


def why_paragraphs(hypothesis: Mapping[str, Any], key: str) -> list[Paragraph]:
    """What speaks for and against one hypothesis, and the one experiment that decides it."""
    found: list[Paragraph] = [("", str(hypothesis.get("text") or hypothesis.get("code") or "?"))]
    pro, contra = mappings(hypothesis.get("for")), mappings(hypothesis.get("against"))
    found += [("  + ", text) for text in _texts(pro)] or [("  + ", "nothing speaks for it so far")]
    found += [("  - ", text) for text in _texts(contra)] or [("  - ", "nothing speaks against it")]
    step = next_of(hypothesis)
    if hypothesis.get("grade") == "confirmed":
        found.append(("  = ", "confirmed: no experiment is needed to decide it"))
    elif step:
        text = str(step.get("text") or step.get("code")).partition(" (not possible on this server")[0]
        how = how_to(step, key)
        short = how.startswith("press ")  # a key stands where a low window still shows it
        found.append(("  ? ", f"what decides it{f', {how}' if short else ''}: {text}"))
        if how and not short:
            found.append(("    ", how))
    return found


def evidence_paragraphs(run: RunState, server: ServerState) -> list[Paragraph]:
    """Next steps, evidence, what was compared and not exercised, and what differs of the server."""
    verdict = run.verdict or {}
    found: list[Paragraph] = []
    for heading, items in (("NEXT", verdict.get("next")), ("EVIDENCE", verdict.get("evidence"))):
        texts = [("  ▸ ", text) for text in _texts(mappings(items))]
        found += [("", heading), *texts, ("", "")] if texts else []
    if run.verdict is None and (missed := missed_lines(run.will_miss)):
        found += [("", "WILL NOT BE EXERCISED BY THIS RUN"), *(("  ▸ ", line) for line in missed), ("", "")]
    found.append(("", "WHAT WAS COMPARED"))
    for helper in run.helpers:
        found += _helper(helper)
    prompts = run.prompts
    digest = str(prompts.get("sha256", "?"))[:16]
    found.append(
        ("  ", f"{prompts.get('count', '?')} prompts, {prompts.get('source', '?')}, sha256 {digest}")
    )
    differs = [f"asked {d.get('asked', '?')}, in force {d.get('in_force', '?')}" for d in server.differs]
    notes = [*differs, *server.notes]
    if notes:
        found += [("", ""), ("", "THE SERVER"), *(("  ", note) for note in notes)]
    return found


def _helper(helper: HelperState) -> list[Paragraph]:
    result: Mapping[str, Any] = helper.result or {}
    if not result.get("tokens"):
        reason = result.get("reason") or "nothing was compared"
        return [("  ", f"{helper.helper}: {helper.status}, {reason}")]
    words = [
        ("  ", f"{helper.helper}: {helper.status}, hits {result.get('hits')}/{result.get('requests')}, "
               f"{result.get('dropped', 0)} dropped"),
        ("    ", f"{result['tokens']} tokens, {result.get('divergent_tokens')} differ, avg_kl_div "
                 f"{kl(result.get('avg_kl_div'))}, max |Δ| {kl(result.get('max_abs_dlogprob'))}"),
    ]  # fmt: skip
    past = result.get("fraction_past")
    if isinstance(past, Mapping) and past:
        some = [f"{float(share):.2%} past {nats}" for nats, share in past.items() if share]
        words.append(("    ", ", ".join(some) if some else f"no token past {next(iter(past))}"))
    if result.get("reason"):
        words.append(("    ", str(result["reason"])))
    return words


def wrapped(paragraphs: Sequence[Paragraph], width: int) -> list[str]:
    """The paragraphs in lines of at most `width` cells, each with a hanging indent under its text."""
    lines: list[str] = []
    for mark, text in paragraphs:
        lines += wrap(mark + visible(text), width, indent=" " * cell_width(mark))
    return lines
