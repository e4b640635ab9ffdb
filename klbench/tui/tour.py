"""The tour of the first start: a real server with a planted fault, from its launch to the located operator.

It only says what is to be seen and which key is next; everything is done by the user's own keys.
"""

from __future__ import annotations

from klbench.core.text import visible, wrap
from klbench.defaults import DEMO_PROMPT_TOKENS
from klbench.session.request import Options, StartRequest, Target
from klbench.tui.actions import key_of
from klbench.tui.model import Model
from klbench.tui.wording import launching

FAULT = "restore-key"
STEPS = 6


def tour_request() -> StartRequest:
    """What the tour looks at: the dense demo with a wrong key row behind restored prefixes."""
    return StartRequest(
        target=Target(kind="demo", model="dense"),
        options=Options(
            samples=16,
            max_new_tokens=32,
            prompt_tokens=DEMO_PROMPT_TOKENS,
            fault=FAULT,
            ready_to_capture=True,
        ),
    )


def stop_of(place: str, model: Model) -> tuple[int, str, str]:
    """Where the tour is on this screen: number of the stop (0: none), what is to be seen, what is next."""
    state = model.state
    if state.server.phase == "failed":
        return (
            0,
            "The server did not start.",
            f"{key_of('log')} shows its log, {key_of('end_tour')} ends the tour",
        )
    if place == "origin":
        return _at_the_origin(model)
    if place == "tokens":
        return (
            4,
            "Both logprobs of every token, and their difference. The strip shows where they differ: from the "
            "first token on, so the state was wrong before generation began.",
            f"{key_of('next_difference')} goes to the next difference, "
            f"{key_of('locate')} finds where it was born",
        )
    if place != "main":
        return 0, "This is off the tour's way.", f"{key_of('back')} goes back"
    return _at_main(model)


def _at_main(model: Model) -> tuple[int, str, str]:
    state = model.state
    if launching(state) or state.run is None:
        return (
            1,
            "The real sglang starts, with a fault planted on purpose: behind a restored prefix one key row "
            "of one layer is wrong.",
            f"wait half a minute to two; {key_of('log')} shows its log",
        )
    if not state.run.ended:
        return (
            2,
            "Every token is scored twice, in decode and in prefill. match does it cold; the two others begin "
            "on a restored prefix.",
            "watch their status; the tables fill by themselves",
        )
    if not any(helper.status == "diverged" for helper in state.run.helpers):
        return (
            3,
            "Nothing diverged here, which this fault should not allow.",
            f"{key_of('end_tour')} ends the tour",
        )
    return (
        3,
        "match is clean, so it is not the rounding of batches; the two that restore a prefix diverge. What "
        "the requests that do have in common is named below the table.",
        f"{key_of('tokens')} opens the tokens of the one under the cursor",
    )


def _at_the_origin(model: Model) -> tuple[int, str, str]:
    job = model.state.job
    if model.located is None or (job is not None and job.kind == "locate"):
        return (
            5,
            "The arms are repeated as they were, and every operator's rows are recorded and paired by token, "
            "position and embedding bits.",
            "wait; it takes about as long as the run",
        )
    return (
        6,
        "Here it was born: its inputs are equal bit for bit in both arms, its output is not. You know the "
        f"truth: {FAULT}. Does the finding say so?",
        f"{key_of('end_tour')} ends the tour; {key_of('report')} writes the report, "
        f"{key_of('guide_all')} explains the whole path",
    )


def tour_lines(place: str, model: Model, width: int) -> list[str]:
    """The tour's words on this screen, in lines of at most `width` cells."""
    number, see, then = stop_of(place, model)
    head = f" TOUR {number}/{STEPS} ▸ " if number else " TOUR ▸ "
    text = visible(f"{see} Next: {then}.")
    return wrap(head + text, max(width - 1, 20), indent="   ")
