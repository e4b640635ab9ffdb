"""Reads what klbench asks of a running server: small control files, watched by a thread even when it is idle.

A control file is replaced as a whole, and its answer is a file too: nothing listens on a port, and nobody but
the folder's owner can ask.
"""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

from .plugin import write_json_atomically

_POLL_S = 0.05
_STILL_S = 2.0
"""How often work that takes long says that it goes on."""


def watch(path: Path, answer: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
    """Gives each new content of `path` to `answer` until the process ends; `failed` hears what went wrong."""
    seen: Any = None
    pause = threading.Event()
    while True:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != seen:
                seen = stamp
                answer(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            pass
        except Exception as error:
            failed(error)
        pause.wait(_POLL_S)


@contextlib.contextmanager
def still_working(path: Path, answer: Dict[str, Any], every_s: float = _STILL_S) -> Iterator[None]:
    """While the block runs, `path` says again and again that the answer is on its way.

    "working" counts up in it; the answer itself has no such field and is written after the block.
    """
    done = threading.Event()

    def say() -> None:
        count = 0
        while not done.wait(every_s):
            count += 1
            # A disk that is full now will be full for the answer, too: that one says so.
            with contextlib.suppress(OSError):
                write_json_atomically(path, dict(answer, working=count))

    saying = threading.Thread(target=say, name="klbench-still", daemon=True)
    saying.start()
    try:
        yield
    finally:
        done.set()
        saying.join()
