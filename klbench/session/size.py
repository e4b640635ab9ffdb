"""How much space a folder takes: bytes of its files, links not followed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def size_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
