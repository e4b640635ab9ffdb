"""Which run of a session was interrupted, and what its server was started with.

Invariant: nothing heavy is imported, for a list of sessions asks this of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from klbench.errors import UsageError
from klbench.session.folder import SessionFolder
from klbench.session.request import StartRequest
from klbench.session.state import RunState, SessionState

if TYPE_CHECKING:
    # Its module imports numpy.
    from klbench.core.columns import HelperName


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The latest run, when something of it is left to do."""

    run: RunState
    left: tuple[HelperName, ...]

    @property
    def in_words(self) -> str:
        """`run 2 was interrupted in prefill_cache_hit (scoring arm); left: ...`."""
        first = self.run.helper(self.left[0])
        where = f"in {self.left[0]}" if first is not None and first.arms else f"before {self.left[0]}"
        if first is not None and first.arms:
            where += f" ({first.arms[-1].arm} arm)"
        more = f", then {', '.join(self.left[1:])}" if len(self.left) > 1 else ""
        return f"run {self.run.number} was interrupted {where}{more}"


def interrupted(state: SessionState) -> Interrupted | None:
    """The latest run, if it did not end by itself. Say it of a session without a runner at work."""
    run = state.run
    if run is None:
        return None
    left = tuple(
        cast("HelperName", helper.helper)
        for helper in run.helpers
        if helper.result is None or (helper.status == "error" and not _ended_whole(run))
    )
    return Interrupted(run, left) if left else None


def _ended_whole(run: RunState) -> bool:
    """Whether every helper had its turn: an error among them is then a result, which repeats."""
    return run.ended and not run.cancelled and all(helper.result is not None for helper in run.helpers)


def start_to_continue(folder: SessionFolder, state: SessionState) -> StartRequest:
    """What the session's latest runner was started with. Raises UsageError where that cannot be repeated."""
    content = folder.read_session_file()
    target = dict(state.runner.target) or content.target
    options = dict(state.runner.options) or content.options
    try:
        start = msgspec.convert({"target": target, "options": options}, StartRequest)
    except msgspec.ValidationError as error:
        raise UsageError(f"cannot continue {folder.name}", why=str(error)) from error
    shown = [*start.target.arguments, start.target.url]
    if any(part.rpartition("=")[2] == "***" or "://***@" in part for part in shown):
        raise UsageError(
            f"cannot continue {folder.name}",
            why="its server was reached with a key, which a session does not keep",
            next="start a new session with the key",
        )
    return start
