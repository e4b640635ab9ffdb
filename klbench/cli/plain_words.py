"""What the line mode shows of a session: sentences and rows in words, one thing a line, nothing by its place.

    request 23: 119 of 128 tokens differ, from offset 0 (position 132) on; prompt 132, cached 131, kl 5.0e-06
    position 132, offset 0, token '\\n': decode -2.3779607, prefill -2.3759606, difference -0.0020001

Pure functions of the model, whose text is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from klbench.cli.progress import helper_line
from klbench.core.text import counted, delta, kl, logprob, magnitude, visible_token
from klbench.session.state import LocatedState
from klbench.tui import experiment_words, guide_words, next_step, origin_words, verdict_words, wording
from klbench.tui.actions import key_of
from klbench.tui.measurement import Measurement
from klbench.tui.model import Model
from klbench.tui.verdict_words import Paragraph, mappings

_WIDE = 100_000
"""A line is as long as it is: who listens to it wants no breaks, and a terminal makes its own."""


def paragraphs(found: Sequence[Paragraph]) -> list[str]:
    """One line a paragraph, without the marks that stand for a place."""
    signs = {"+": "for: ", "-": "against: ", "?": "", "=": "", "▸": ""}
    lines = []
    for mark, text in found:
        sign = "" if text.startswith("nothing speaks") else mark.strip()
        lines.append(signs.get(sign, f"{sign} " if sign else "") + text)
    return [line for line in lines if line.strip()]


def statement(model: Model) -> list[str]:
    """What is to be known, and what to do next; nothing of what moves while a run goes on."""
    state = model.state
    if state.question is None and state.run is not None and not state.run.ended and model.working:
        return []
    todo = next_step.sentence(model.guide_states())
    return wording.sentences(state, live=model.live, now=model.now, todo=todo, located=model.located)


def status(model: Model) -> list[str]:
    """Where it stands, from the beginning."""
    state = model.state
    doing = wording.status(state, _WIDE, live=model.live, mark=model.mark, now=model.now)
    head = [wording.title(state, model.session_name, _WIDE).strip(), doing.strip(" ●○◌✗")]
    return [" ".join(line.split()) for line in head] + helpers(model) + statement(model)


def helpers(model: Model) -> list[str]:
    """The helpers of the latest run, each in a line."""
    run = model.run
    return [
        helper_line(h.helper, h.result) if h.result is not None else f"{h.helper} · {h.status}"
        for h in (run.helpers if run is not None else ())
    ]


def requests(measured: Measurement, most: int) -> list[str]:
    """The requests that differ, the worst first, and how many there are."""
    dirty = int(np.count_nonzero(measured.differing))
    total = counted(measured.columns.requests, "request")
    head = f"{measured.columns.helper}: {dirty} of {total} diverged"
    shown = measured.divergent_first()[: min(most, dirty)]
    more = [f"{dirty - len(shown)} more diverged"] if dirty > len(shown) else []
    return [head, *(request(measured, int(number)) for number in shown), *more]


def request(measured: Measurement, number: int) -> str:
    c, first = measured.columns, int(measured.first_offset[number])
    said = f"request {number}: {measured.differing[number]} of {measured.compared[number]} tokens differ"
    if first >= 0:
        said += f", from offset {first} (position {int(c.prompt_len[number]) + first}) on"
    said += f"; prompt {c.prompt_len[number]}, cached {c.cached_generation[number]}"
    largest = magnitude(float(measured.max_abs_nats[number]))
    return f"{said}, kl {kl(float(measured.kl_nats[number]))}, at most {largest}"


def tokens(measured: Measurement, number: int, most: int) -> list[str]:
    """The first tokens of a request that differ."""
    c, where = measured.columns, measured.columns.tokens_of(number)
    offsets = np.flatnonzero(measured.differs[where])
    lines = [request(measured, number)]
    for offset in offsets[:most].tolist():
        at = int(c.start[number]) + offset
        token = int(c.token_id[at])
        text = measured.text_of(token)
        shown = f"#{token}" if text is None else visible_token(text)
        lines.append(
            f"position {int(c.prompt_len[number]) + offset}, offset {offset}, token {shown}: "
            f"decode {logprob(float(c.decode_nats[at])).strip()}, prefill "
            f"{logprob(float(c.prefill_nats[at])).strip()}, difference "
            f"{delta(float(measured.delta_nats[at])).strip()}"
        )
    if c.lost[number]:
        lines.append("offset 0 was not compared: the server lost its logprob")
    left = len(offsets) - min(most, len(offsets))
    return [*lines, f"{counted(left, 'more token differs', 'more tokens differ')}"] if left else lines


def verdict(model: Model) -> list[str]:
    """The verdict, each explanation with what speaks for and against it, and the evidence."""
    run = model.run
    lines = [line.strip(" ▸") for line in verdict_words.summary_lines(run)]
    if run is None:
        return lines
    for number, one in enumerate(verdict_words.hypotheses_of(run), 1):
        grade, about = one.get("grade"), paragraphs(verdict_words.why_paragraphs(one, _way(one)))
        about = [text.replace(", press take", ", take").replace(", press make", ", make") for text in about]
        lines += [f"explanation {number}, {grade}: {about[0]}", *about[1:]]
    return lines + paragraphs(verdict_words.evidence_paragraphs(run, model.state.server))


def _way(hypothesis: Mapping[str, Any]) -> str:
    """The command that makes what decides it; the helpers are run by a key of one letter."""
    code = str(verdict_words.next_of(hypothesis).get("code") or "")
    return {"census": "take_census", "run_match": key_of("run")}.get(code, f"make {code}")


def origin(found: LocatedState) -> list[str]:
    """Every finding with its evidence, and the operators around the first."""
    lines = [origin_words.title_line(found).strip()]
    for number in range(max(len(mappings(found.result.get("findings"))), 1)):
        lines += [" ".join(line.split()) for line in origin_words.summary_lines(found, number)]
        lines += paragraphs(origin_words.evidence_paragraphs(found, number)) if number == 0 else []
    return lines + [_operator(one) for one in mappings(found.result.get("around"))]


def _operator(one: Mapping[str, Any]) -> str:
    born = "the origin, " if one.get("origin") else ""
    state = "" if one.get("state") in (None, "none") else f", state {str(one.get('state')).replace('_', ' ')}"
    ulps = f", {counted(one['ulp_max'], 'ulp')}" if isinstance(one.get("ulp_max"), int) else ""
    return f"{born}{one.get('module')}: inputs {one.get('inputs')}{state}, output {one.get('output')}{ulps}"


def experiments(model: Model) -> list[str]:
    """Every experiment: how it stands, what it found, or why it cannot be made here."""
    lines, wanted = [], experiment_words.proposed(model.state)
    for one in experiment_words.matrix(model.state):
        found = one.impossible or (str(one.made.result.get("text") or "") if one.made is not None else "")
        next_one = ", the verdict proposes it" if one.name == wanted else ""
        lines.append(f"{one.name}: {one.state}{next_one}" + (f", {found}" if found else ""))
    return [*lines, "make NAME makes one"]


def census(model: Model) -> list[str]:
    """The operators whose bits depend on the row count, and how many do not."""
    taken = model.state.latest_census
    if taken is None:
        return ["no census was taken: take_census takes one"]
    operators = mappings(taken.result.get("operators"))
    bad = [one for one in operators if one.get("status") == "not_invariant"]
    lines = [
        f"{len(bad)} of {counted(len(operators), 'operator depends', 'operators depend')} on the row count"
    ]
    return lines + [f"{one.get('module')}: from {one.get('first_M')} rows on" for one in bad]


def guide(model: Model) -> list[str]:
    """All steps, each in a line; the current one in full."""
    states = model.guide_states()
    now = next_step.current(states)
    lines = []
    for number, item in enumerate(states, 1):
        said = {"now": "next", "not_needed": "not needed"}.get(item.state, item.state)
        lines.append(f"step {number} of {len(states)}, {said}: {item.step.title}")
        if item is now:
            lines += [" ".join(text.split()) for text in paragraphs(guide_words.explanation(item)[1:])]
        elif item.learned:
            lines.append(f"learned: {item.learned}")
    return lines
