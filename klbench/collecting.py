"""The garbage collector while something starts.

What importing makes stays for good: looking through it for garbage, a hundred times, takes a tenth of a
start.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Collect nothing inside, or until `begin`."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def begin() -> None:
    """Collect from now on, where that was put off; what is there already is not looked through again."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
