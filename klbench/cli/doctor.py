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
from dataclasses import asdict, dataclass
from pathlib import Path

from klbench import paths
from klbench.cli import table
from klbench.cli.failures import write_json
from klbench.errors import ExitCode, KlbenchError

LOW_DISK_BYTES = 5 * 1000**3
"""A layer dump of a large model takes a few GB."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: `status` is ok, note or broken; `mend` says what to do about it."""

    status: str
    name: str
    found: str
    mend: str = ""


def examine(server_python: str | None, json_place: str | None) -> int:
    """Runs all checks, prints them, and returns the exit code."""
    checks = [
        _state(),
        _socket(),
        *asyncio.run(_engine(server_python)),
        _disk(),
        _locale(),
        *_tmux(),
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


async def _engine(named: str | None) -> list[Check]:
    from klbench.engine.gpu import list_gpus
    from klbench.engine.server_python import find_server_python

    checks = []
    try:
        python = await find_server_python(Path(named) if named else None)
        torch = f"torch {python.torch_version}, CUDA {python.torch_cuda or 'none'}"
        checks.append(Check("ok", "sglang", f"{python.sentence}, {torch}"))
        checks += [Check("note", "sglang", f"passed over {text}") for text in python.passed_over]
    except KlbenchError as error:
        checks.append(
            Check("broken", "sglang", f"{error.what}: {error.why}", error.next + "; --url works without")
        )
    gpus = await list_gpus()
    checks += [Check("ok", "gpu", gpu.sentence) for gpu in gpus]
    if not gpus:
        found = "no CUDA GPU: --demo uses the embedded engine, the real sglang on the CPU"
        checks.append(Check("note", "gpu", found, f"{os.cpu_count()} CPU cores here"))
    elif (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        checks.append(Check("note", "gpu", f"CUDA_VISIBLE_DEVICES={visible} is respected"))
    return checks


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
    return Check("note", "locale", f"{encoding}: signs may not show", "export LC_ALL=C.UTF-8")


def _tmux() -> list[Check]:
    if "TMUX" not in os.environ or shutil.which("tmux") is None:
        return []
    try:
        shown = subprocess.run(
            ["tmux", "show-options", "-sv", "escape-time"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return []
    if shown.isdigit() and int(shown) > 50:
        found = f"escape-time is {shown} ms: Escape feels slow"
        return [Check("note", "tmux", found, "tmux set -sg escape-time 10")]
    return [Check("ok", "tmux", f"escape-time {shown} ms")]
