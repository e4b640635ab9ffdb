"""Doing what another session did once more: the same command, prompts and helpers, to compare.

start, side = start_like(folder)
verdict_changes(side, side_of(new, read_state(new)))     # ["match: clean then, diverged now"]
"""

from __future__ import annotations

import msgspec

from klbench.errors import UndecidedError
from klbench.session import events as ev
from klbench.session.bundle import is_unpacked
from klbench.session.columns import load_columns
from klbench.session.comparing import Side, side_of
from klbench.session.continuing import recorded_prompts_file
from klbench.session.folder import SessionFolder
from klbench.session.interruption import start_to_continue
from klbench.session.log import each_entry
from klbench.session.reading import read_state
from klbench.session.request import StartRequest


def start_like(folder: SessionFolder) -> tuple[StartRequest, Side]:
    """The request that repeats the session's latest measured run, and that run to compare with.

    Prompts are the recorded ones where they came from a file or from LongBench, whose choice is not the same
    twice; seeded ones are made again. Of a bundle no path of the machine that it comes from is taken over.
    Raises KlbenchError for a session that cannot be repeated.
    """
    state = read_state(folder)
    side = side_of(folder, state)
    start = start_to_continue(folder, state)
    options = start.options
    file = recorded_prompts_file(folder, side.run)
    if options.prompts is not None and file is not None:
        options = msgspec.structs.replace(options, prompts=str(file))
    elif is_unpacked(folder) and options.prompts not in (None, "longbench"):
        raise UndecidedError(
            "the run of this bundle cannot be repeated",
            why="its prompts came from a file, and the bundle does not hold them",
            next="klbench run with the same options and --prompts FILE",
        )
    if is_unpacked(folder):
        options = msgspec.structs.replace(options, server_python=None, trace_dir=None, path_maps=())
    options = msgspec.structs.replace(options, helpers=tuple(helper.helper for helper in side.run.helpers))
    return msgspec.structs.replace(start, options=options), side


def check_then(side: Side, *, verdict: bool) -> None:
    """Raises UndecidedError where the earlier run cannot be compared with: before a server is started.

    Its columns must be readable and, where its verdict is wanted, all helpers measured to their end.
    """
    name = side.folder.name
    unended = [helper.helper for helper in side.run.helpers if helper.result is None]
    if verdict and (unended or not side.run.ended):
        raise UndecidedError(
            f"run {side.run.number} of {name} was not measured to its end",
            why=f"{', '.join(unended) or 'the run'} did not end: there is no verdict to compare with",
            next=f"klbench open {name}, then continue it; or repeat it without --same-verdict",
        )
    for helper in side.run.helpers:
        if helper.columns is not None:
            try:
                load_columns(side.folder.resolve(helper.columns))
            except UndecidedError as error:
                raise UndecidedError(
                    f"nothing can be compared with {helper.helper} of {name}: {error.what}",
                    why=error.why,
                    next="klbench run with the same options measures anew, without a comparison",
                ) from error


def verdict_changes(before: Side, after: Side) -> list[str]:
    """What the later run says otherwise than the earlier one, in words; nothing where both say the same.

    Helpers are compared by their status, the verdicts by status, conditions and grade as they were when the
    runs ended: what was located and tried since then says more than a run alone can.
    """
    changes = []
    for name in dict.fromkeys(helper.helper for side in (before, after) for helper in side.run.helpers):
        one, two = (
            found.status if (found := side.run.helper(name)) else "not_run" for side in (before, after)
        )
        if one != two:
            changes.append(f"{name}: {one} then, {two} now")
    one, two = _verdict_in_words(before), _verdict_in_words(after)
    return changes if one == two else [*changes, f"verdict: {one} then, {two} now"]


def _verdict_in_words(side: Side) -> str:
    """`found (different_function, probable)`: what the run alone said."""
    ended = [
        entry.event.verdict
        for entry in each_entry(side.folder.events)
        if isinstance(entry.event, ev.RunEnded) and entry.event.run == side.run.number
    ]
    if not ended:
        return "none, for the run did not end"
    conditions = [str(condition) for condition in ended[-1].get("conditions") or ()]
    return f"{ended[-1].get('status')} ({', '.join([*conditions, str(ended[-1].get('grade'))])})"
