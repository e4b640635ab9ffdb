"""`klbench doctor`: what this machine can do, line by line, and how to mend what it cannot.

    ok      sglang   0.5.23 from /opt/conda/lib/python3.11/site-packages/sglang
    note    gpu      none: the embedded engine runs the real sglang on the CPU
    broken  state    /home/a/.local/state/klbench is read-only · set KLBENCH_HOME to a folder of yours

Exit code 1 when something is broken; notes are not.
"""

from __future__ import annotations

import asyncio
import locale
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from klbench import paths
from klbench.cli import table
from klbench.cli.failures import write_json
from klbench.engine.machine import Check, check_machine
from klbench.engine.orphans import find_orphans
from klbench.errors import ExitCode, KlbenchError

LOW_DISK_BYTES = 5 * 1000**3
"""A layer dump of a large model takes a few GB."""

_SLOW_ESCAPE_MS = 50


def examine(server_python: str | None, json_place: str | None, *, end_left_over: bool = False) -> int:
    """Runs all checks, prints them, and returns the exit code."""
    if end_left_over:
        for orphans in find_orphans():
            table.out(f"ended {orphans.end()}: {orphans.sentence}")
    checks = [
        _state(),
        _socket(),
        *asyncio.run(check_machine(Path(server_python) if server_python else None)),
        _disk(),
        _locale(),
        *_terminal(os.environ),
        *_tmux(os.environ),
    ]
    broken = any(check.status == "broken" for check in checks)
    if json_place is not None:
        write_json(json_place, {"ok": not broken, "checks": [asdict(check) for check in checks]})
    if json_place != "-":
        rows = [
            (check.status, check.name, check.found + (f" · {check.mend}" if check.mend else ""))
            for check in checks
        ]
        for line in table.columns(("", "what", "found"), rows)[1:]:
            table.out(line)
    return ExitCode.DIVERGED if broken else ExitCode.CONSISTENT


def _state() -> Check:
    try:
        root = paths.make_private(paths.home())
        probe = root / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except (KlbenchError, OSError) as error:
        return Check("broken", "state", str(error), "set KLBENCH_HOME to a folder of yours")
    return Check("ok", "state", f"sessions lie under {paths.sessions_root()}")


def _socket() -> Check:
    try:
        return Check("ok", "socket", f"runners listen in {paths.socket_folder()}")
    except KlbenchError as error:
        return Check("broken", "socket", f"{error.what}: {error.why}", error.next)


def _disk() -> Check:
    place = paths.home()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / 1000**3:.1f} GB free under {place}"
    if free < LOW_DISK_BYTES:
        return Check("note", "disk", found, "captures of large models need more: --trace-dir DIR")
    return Check("ok", "disk", found)


def _locale() -> Check:
    encoding = locale.getpreferredencoding(False)
    if encoding.upper().replace("-", "") == "UTF8":
        return Check("ok", "locale", encoding)
    return Check("note", "locale", f"{encoding}: signs may not show", "export LC_ALL=C.UTF-8, or use --ascii")


def _terminal(environment: Mapping[str, str]) -> list[Check]:
    name = environment.get("TERM", "")
    if name in ("", "dumb"):
        mend = "export TERM=xterm-256color, or use the commands without the workbench"
        return [Check("note", "terminal", f"TERM={name or 'not set'} can draw no screen", mend)]
    size = shutil.get_terminal_size()
    found = f"TERM={name}, {size.columns}x{size.lines}"
    if environment.get("NO_COLOR"):
        found += ", NO_COLOR: monochrome"
    if size.columns < 60 or size.lines < 16:
        mend = "the workbench shows all in 80x24 or more; it works from 60x16 on"
        return [Check("note", "terminal", found, mend)]
    return [Check("ok", "terminal", found)]


def _tmux(environment: Mapping[str, str]) -> list[Check]:
    if "TMUX" not in environment or shutil.which("tmux") is None:
        return []
    checks = []
    escape = _tmux_option("escape-time")
    if escape.isdigit() and int(escape) > _SLOW_ESCAPE_MS:
        found = f"escape-time is {escape} ms: Escape feels slow"
        checks.append(Check("note", "tmux", found, "tmux set -sg escape-time 10"))
    elif escape:
        checks.append(Check("ok", "tmux", f"escape-time {escape} ms"))
    clipboard = _tmux_option("set-clipboard")
    if clipboard == "off":
        found = "set-clipboard is off: what you copy stays in tmux and in its file"
        checks.append(Check("note", "tmux", found, "tmux set -s set-clipboard on"))
    return checks


def _tmux_option(name: str) -> str:
    try:
        return subprocess.run(
            ["tmux", "show-options", "-sv", name], capture_output=True, text=True, timeout=5, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
