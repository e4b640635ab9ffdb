"""What the guide's panel says, in three sizes: one line, a few lines, and all steps.

guide 4/7 ▸ settle condition 2: the same function · X
  why      A wrong restore and arithmetic of few rows look alike until they are told apart.
  learned  cold requests are bit-equal: decode and prefill agree without a restore
  next     restore the same prefixes with many rows behind them · press X
"""

from __future__ import annotations

from collections.abc import Sequence

from klbench.core.guide import StepState, terms_in
from klbench.core.text import cell_width, fit, fit_words, shortened, visible, wrap
from klbench.tui.actions import key_of
from klbench.tui.next_step import current, way_of
from klbench.tui.verdict_words import Paragraph

_LABEL = 9
_TITLE = 16
"""Cells that a title has at least beside what stands behind it."""
_MOST_ROWS = 3
"""Lines below the step's own in a window that is not tall: more would take the requests' place."""


def learned(states: Sequence[StepState]) -> str:
    """What was learned last: by the current step, else by the latest one that is done."""
    now = current(states)
    if now is not None and now.learned:
        return now.learned
    done = [item for item in states if item.state == "done" and item.learned]
    before = [item for item in done if now is None or states.index(item) < states.index(now)]
    return before[-1].learned if before else ""


def line(states: Sequence[StepState], width: int) -> str:
    """The current step and its key in one line."""
    now = current(states)
    if now is None:
        return fit(f" guide ✓ every step has its answer · {key_of('guide_all')} all steps", width)
    place = states.index(now) + 1
    head = f" guide {place}/{len(states)} ▸ "
    way, explains = f" · {visible(way_of(now))}", f" · {key_of('guide_all')} explains"
    title = visible(now.step.title)
    # The whole title and the way come first, then the way and what is left of the title.
    wanted = [(tail, least) for least in (cell_width(title), _TITLE) for tail in (way + explains, way)]
    tail = next((one for one, least in wanted if cell_width(head + one) + least <= width), explains)
    room = width - cell_width(head) - cell_width(tail)
    return head + fit_words(title, max(room, 8)).rstrip() + tail


def compact(states: Sequence[StepState], width: int, *, tall: bool = True) -> list[str]:
    """The current step and, where there is room, why it matters; what was learned and what is next with its
    key, each in at most two lines. In a window that is not tall, where that is too much, only what was
    learned stands below the step and its key.
    """
    now = current(states)
    if now is None:
        return [line(states, width)]
    head = f" guide {states.index(now) + 1}/{len(states)} ▸ {visible(now.step.title)}"
    tail = f" · {key_of('guide_all')} explains"
    found = [shortened(f"{head} · {visible(now.step.short)}", width - cell_width(tail)) + tail]
    said = _at_most_two("learned", learned(states) or "nothing so far", width)
    todo = _at_most_two("next", now.todo.partition(": ")[0], width, end=f" · {visible(way_of(now))}")
    if not tall and len(said) + len(todo) > _MOST_ROWS:
        return [line(states, width), *said]
    return [*found, *said, *todo]


def _at_most_two(label: str, text: str, width: int, *, end: str = "") -> list[str]:
    """The text and its `end` in one line or two, under a label; the guide in full has what a second line has
    no room for."""
    indent = " " * (_LABEL + 3)
    first, *rest = wrap(f"   {label:<{_LABEL}}{visible(text)}{end}", width, indent=indent)
    if len(rest) < 2:
        return [first, *rest]
    joined = " ".join(line.strip() for line in rest).removesuffix(end)
    return [first, fit_words(indent + joined, width - cell_width(end)).rstrip() + end]


def full(states: Sequence[StepState], width: int) -> list[str]:
    """All steps; the current one with why, learned, next and the words that it uses."""
    found: list[str] = []
    for item in states:
        found += wrap(f" {item.mark} {visible(item.step.title)}", width, indent="   ")
        if item.state == "now":
            found += _indented("why: " + item.step.short, width)
            if said := learned(states):
                found += _indented("learned: " + said, width)
            found += _indented(f"next: {item.todo}", width)
            found += [*_indented(way_of(item), width), ""]
    return [*found, "", f" {key_of('guide_all')} explains the steps, {key_of('guide')} hides this"]


def _indented(text: str, width: int) -> list[str]:
    return wrap("   " + visible(text), width, indent="   ")


def explanation(item: StepState) -> list[Paragraph]:
    """One step in full: question, why, how, what was learned, what is next, and the terms that it uses."""
    step = item.step
    said = {
        "done": "done", "now": "this is the next step", "open": "open", "skipped": "passed over",
        "not_needed": "not needed",
    }[item.state]  # fmt: skip
    found: list[Paragraph] = [("", f"{step.title} · {said}"), ("  asks      ", step.question)]
    if item.state in ("now", "open", "skipped"):
        what = f"{item.todo} · " if item.todo != step.how else ""
        found.append(("  next      ", f"{what}{way_of(item)}"))
    if item.learned:
        found.append(("  learned   ", item.learned))
    found += [("  why       ", step.why), ("  how       ", step.how), ("  headless  ", item.command)]
    text = " ".join((step.title, step.question, step.why, step.how, item.learned, item.todo))
    words = [(f"  {word}: ", meaning) for word, meaning in sorted(terms_in(text).items(), key=_by_word)]
    return [*found, ("", ""), ("", "WORDS"), *words] if words else found


def _by_word(item: tuple[str, str]) -> str:
    return item[0].lower()
