"""Reading a session as it stands: who works on it, and the fold of its log.

Invariant: nothing heavy is imported, for a list of sessions and a look at one need no more than this.
"""

from __future__ import annotations

from klbench.errors import UndecidedError
from klbench.session.folder import SessionFolder
from klbench.session.lock import Lock
from klbench.session.log import each_entry
from klbench.session.state import SessionState, fold, without_runner


def find_runner(folder: SessionFolder) -> Lock | None:
    """The lock of the runner at work, None when there is none. One of another host is taken for alive."""
    lock = folder.read_lock()
    return lock if lock is not None and lock.alive else None


def read_state(folder: SessionFolder) -> SessionState:
    """The session as it stands: the fold of its log, corrected when its runner was killed.

    Lines that cannot be read are in its `damage`. Raises UndecidedError where none of them can, or the log
    cannot be opened.
    """
    try:
        state = fold(each_entry(folder.events))
    except OSError as error:
        raise UndecidedError(
            f"cannot read {folder.events}", why=error.strerror or str(error), next="klbench sessions"
        ) from error
    if state.damage.count and not state.known_events:
        raise UndecidedError(
            f"nothing in {folder.events} can be read",
            why=state.damage.in_words,
            next="the columns in runs/ and the reports may still be whole; measure again in a new session",
        )
    return state if find_runner(folder) is not None else without_runner(state)
