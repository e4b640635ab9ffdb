"""The one next step: what the guided path asks for now, and the way to it from this terminal.

    settle condition 2 · locate the origin in request 5, the one under the cursor · press o
    settle condition 2 · locate the origin in request 5 · U starts the server, then o

The guide and the main screen both say what stands here, so that they cannot disagree. Where a key would do
nothing (the registry of actions knows), the way is the key or the command that works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from klbench.core.guide import StepState
from klbench.tui.actions import BY_ID, by_default, key_now, key_of
from klbench.tui.situation import Situation, can_continue, can_ready, can_start_server

_MADE_BY = {"X": "make", "M": "take_census"}
"""Keys that open a screen whose own action does the step."""
_WAITS = "wait: "


def reachable(states: Sequence[StepState], situation: Situation) -> tuple[StepState, ...]:
    """The steps, those without an answer with the way to do them from here."""
    return tuple(
        _reachable(item, situation) if item.state in ("now", "open", "skipped") else item for item in states
    )


def current(states: Sequence[StepState]) -> StepState | None:
    """The step that is next, None where all are done."""
    return next((item for item in states if item.state == "now"), None)


def sentence(states: Sequence[StepState]) -> str:
    """What is next and the way to it, in one sentence; empty where every step has its answer."""
    if (now := current(states)) is None:
        return ""
    todo = now.todo[:1].lower() + now.todo[1:] if now.todo == now.step.how else now.todo
    todo = todo.replace(_WAITS, "wait, ", 1)
    return f"{todo.rstrip('.')} · {way_of(now)}"


def way_of(item: StepState) -> str:
    """The way to do a step: what was found to work from here, else its key."""
    return item.way or f"press {key_now(item.key)}"


def _reachable(item: StepState, situation: Situation) -> StepState:
    if item.todo.startswith(_WAITS):
        return item
    if item.state == "now" and situation.server == "failed" and not situation.job:
        return replace(item, todo="look at the server's log: it says why it failed", key="l", way="")
    if item.step.code == "helpers" and situation.interrupted and can_continue(situation) is True:
        again = f", or run all again · press {key_of('run')}" if can_ready(situation) is True else ""
        return replace(item, todo="continue the run where it was", way=f"press {key_of('continue')}{again}")
    todo = item.todo
    if item.key == "o" and situation.request is not None and situation.request_diverged:
        todo = f"locate the origin in request {situation.request}, the one under the cursor"
    return replace(item, todo=todo, way=way(item.key, situation))


def way(key: str, situation: Situation) -> str:
    """How to do from here what the main screen's `key` (the default one) does."""
    press = f"press {key_now(key)}"
    action = BY_ID[_MADE_BY[key]] if key in _MADE_BY else by_default(key)
    working = situation.job and (situation.live or situation.readable_only)
    if action is None or working or action.enabled(situation) is True:
        return press
    if action.id == "report" and not situation.live:
        return f"in a shell: klbench report {situation.name}"
    if action.id == "locate" and can_ready(situation) is True:
        return f"choose a request that differs, then {press}" if situation.request is not None else press
    if action.id == "run" and not situation.live and can_continue(situation) is True:
        return f"{key_of('continue')} starts the server and runs the helpers"
    if situation.watching and situation.live:
        return f"{key_of('control')} takes control, then {key_now(key)}"
    if can_start_server(situation) is True:
        return f"{key_of('start_server')} starts the server, then {key_now(key)}"
    if situation.readable_only:
        return f"in a shell: klbench run --like {situation.name}"
    return press
