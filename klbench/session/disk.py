"""The disks that a runner writes to: a floor that its work leaves free, and a reserve for its last words.

The reserve is a small file in the session that is given up when the event log cannot grow, so that why it
ended, and that it ended, is still written.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from klbench.session.folder import SessionFolder, write_atomically
from klbench.storage import StorageError, too_little_room

RESERVE_BYTES = 64 * 1024


class Disk:
    """The session's disk and that of its traces, while a runner works."""

    look_every_s = 2.0
    """A digest trace grows by less than the floor meanwhile; a look costs two system calls."""

    def __init__(self, folder: SessionFolder, trace_dir: str | None) -> None:
        self._places = [folder.path, *([Path(trace_dir)] if trace_dir else [])]
        self._reserve = folder.path / "reserve"
        self.refusal: StorageError | None = None
        """Why the job in progress had to stop."""

    def __enter__(self) -> Disk:
        # Without one the last words may be lost, nothing else.
        with contextlib.suppress(OSError):
            write_atomically(self._reserve, b"\0" * RESERVE_BYTES)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.use_reserve()

    def use_reserve(self) -> None:
        """Gives the reserve's room to whoever writes next."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def refuses(self) -> bool:
        """Whether less than the floor is left on one of the disks; `refusal` then says so."""
        for place in self._places:
            if (error := too_little_room(place)) is not None:
                self.refusal = error
                return True
        return False
