"""Reads what klbench asks of a running server: small control files, watched by a thread even when it is idle.

A control file is replaced as a whole, and its answer is a file too: nothing listens on a port, and nobody but
the folder's owner can ask.
"""

import json
import threading
from pathlib import Path
from typing import Any, Callable

_POLL_S = 0.05


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
