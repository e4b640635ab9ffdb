"""Which process a pid means: a pid alone is used again, a pid with its start is not."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path


def this_host() -> str:
    return socket.gethostname()


def this_namespace() -> str:
    """The numbering that this process's pids belong to: another container on the same host has its own, in
    which a pid means another process. Empty where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """What tells this process from every other that had or will have its pid; None when there is none.

    On Linux the start in clock ticks since boot with the boot's id, which no change of the clock moves.
    A zombie is gone: it only waits for its parent to read its exit code.
    """
    if pid <= 0:
        return None
    if Path("/proc/self/stat").exists():
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        # The name in parentheses may hold spaces and parentheses itself.
        fields = status.rpartition(")")[2].split()
        return None if fields[0] in "ZXx" else f"{boot}:{fields[19]}"
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return shown[1].strip() if len(shown) == 2 and not shown[0].startswith("Z") else None
