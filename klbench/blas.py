"""The threads of numpy's linear algebra, which the workbench has no use for.

They are started as numpy is imported, and each then turns on a core of its own until it goes to sleep: a
third of what the import costs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_THREADS = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Import numpy inside without its threads; what the user has set stays, and no child inherits it."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)
