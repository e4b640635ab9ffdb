"""`klbench guide`: the guided path as text, for everybody or for one session.

✓ server       a deterministic server, read back
               attention torch_native, radix cache on, page 1
▸ condition_1  settle condition 1: batch invariance
               Does a token's result depend on which other tokens share its forward?
"""

from __future__ import annotations

from typing import Any

from klbench.cli import table
from klbench.cli.failures import write_json
from klbench.core.guide import GLOSSARY, STEPS, GuideFacts, StepState, where_we_are
from klbench.core.text import wrap
from klbench.errors import ExitCode, UsageError
from klbench.tui.actions import key_now

_WIDTH = 100
_INDENT = 4


def show_guide(step: str | None, session: str | None, terms: bool, json_place: str | None) -> int:
    """Prints all steps in short, one step in full, a session's place in them, or the words."""
    if step is not None and step not in {known.code for known in STEPS}:
        raise UsageError(f"there is no step {step!r}", why=f"there are: {', '.join(s.code for s in STEPS)}")
    states = where_we_are(_facts(session)) if session is not None else None
    if json_place is not None:
        write_json(json_place, _document(states))
    if json_place == "-":
        return ExitCode.CONSISTENT
    if terms:
        for word, meaning in GLOSSARY.items():
            _paragraph(word, meaning)
        return ExitCode.CONSISTENT
    for index, known in enumerate(STEPS):
        state = states[index] if states is not None else None
        if step in (None, known.code):
            _show_step(known, state, full=step is not None or (state is not None and state.state == "now"))
    if step is None and states is None:
        table.out()
        table.out("klbench guide STEP explains one · --terms the words · --session SESSION where one stands")
    return ExitCode.CONSISTENT


def _facts(session: str) -> GuideFacts:
    from klbench.session.folder import find_session
    from klbench.session.guided import guide_facts
    from klbench.session.reading import read_state

    folder = find_session(session)
    folder.read_session_file()
    return guide_facts(read_state(folder), reported=any(folder.reports.glob("*.md")))


def _show_step(step: Any, state: StepState | None, *, full: bool) -> None:
    mark = f"{state.mark} " if state is not None else ""
    table.out(f"{mark}{step.code:<12} {step.title}")
    if state is not None and state.learned:
        _paragraph("", state.learned)
    if not full:
        _paragraph("", f"{step.question} {step.short}")
        return
    for text in (step.question, step.why, step.how):
        _paragraph("", text)
    key, command = step.key, step.command
    if state is not None and state.todo != step.how:
        key, command = state.key, state.command
        _paragraph("", f"next: {state.todo}")
    _paragraph("", f"in the workbench: {key_now(key)} · without it: {command}")


def _paragraph(head: str, text: str) -> None:
    if head:
        table.out(head)
    for line in wrap(text, _WIDTH - _INDENT):
        table.out(" " * _INDENT + line)


def _document(states: tuple[StepState, ...] | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for index, step in enumerate(STEPS):
        entry: dict[str, Any] = {name: getattr(step, name) for name in step.__slots__}
        if states is not None:
            state = states[index]
            entry |= {"state": state.state, "learned": state.learned, "todo": state.todo, "key": state.key}
        steps.append(entry)
    return {"schema": "klbench.guide/1", "steps": steps, "terms": dict(GLOSSARY)}
