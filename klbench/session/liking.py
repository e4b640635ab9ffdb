"""Doing what another session did once more: the same command, prompts and helpers, to compare."""

from __future__ import annotations

import msgspec

from klbench.session.comparing import Side, side_of
from klbench.session.continuing import recorded_prompts_file, start_to_continue
from klbench.session.folder import SessionFolder
from klbench.session.link import read_state
from klbench.session.request import StartRequest


def start_like(folder: SessionFolder) -> tuple[StartRequest, Side]:
    """The request that repeats the session's latest measured run, and that run to compare with.

    Prompts are the recorded ones where they came from a file or from LongBench, whose choice is not the same
    twice; seeded ones are made again. Raises KlbenchError for a session that cannot be repeated.
    """
    state = read_state(folder)
    side = side_of(folder, state)
    start = start_to_continue(folder, state)
    options = start.options
    file = recorded_prompts_file(folder, side.run)
    if options.prompts is not None and file is not None:
        options = msgspec.structs.replace(options, prompts=str(file))
    options = msgspec.structs.replace(options, helpers=tuple(helper.helper for helper in side.run.helpers))
    return msgspec.structs.replace(start, options=options), side
