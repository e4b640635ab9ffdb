"""Which Python runs the server, and what its sglang is and takes.

The Python is the one that was named, else the first of: the active virtual environment, the active conda
environment, our own, `python3` on PATH, that finds sglang. It is asked in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

import klbench
from klbench.errors import ServerError

_PROBE = Path(klbench.__file__).parent / "insitu" / "probe.py"
_MARK = "klbench-probe:"
_DESCRIBE_LIMIT_S = 60.0
_FLAGS_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class ServerPython:
    """A Python that finds sglang. `why` says how it was chosen; `passed_over` the ones that were not."""

    path: Path
    why: str
    python: str
    sglang_path: Path
    sglang_version: str
    torch_version: str | None
    torch_cuda: str | None
    passed_over: tuple[str, ...] = ()
    wants_torch: str | None = None
    """What this sglang's metadata asks of torch ("==2.11.0")."""

    @property
    def sentence(self) -> str:
        return f"{self.path} ({self.why}): sglang {self.sglang_version} from {self.sglang_path}"

    @property
    def torch_fits(self) -> bool | None:
        """Whether the installed torch is the one that sglang asks for; None where that cannot be told.

        sglang pins one exact version, and builds for other CUDA versions differ in the local part only.
        """
        if self.wants_torch is None or self.torch_version is None or not self.wants_torch.startswith("=="):
            return None
        return self.torch_version.partition("+")[0] == self.wants_torch.removeprefix("==").strip()


@dataclass(frozen=True, slots=True)
class Flags:
    """The options that an installed sglang takes, with their choices (None: anything)."""

    known: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)

    def __contains__(self, option: str) -> bool:
        return option in self.known

    def takes(self, option: str, choice: str) -> bool:
        if option not in self.known:
            return False
        choices = self.known[option]
        return choices is None or choice in choices


def _candidates(environment: Mapping[str, str]) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for variable, name in (("VIRTUAL_ENV", "active virtual environment"), ("CONDA_PREFIX", "active conda")):
        if prefix := environment.get(variable):
            found.append((Path(prefix) / "bin" / "python", name))
    found.append((Path(sys.executable), "klbench's own"))
    if on_path := shutil.which("python3", path=environment.get("PATH")):
        found.append((Path(on_path), "python3 on PATH"))
    unique: dict[Path, str] = {}
    for path, why in found:
        unique.setdefault(path, why)
    return list(unique.items())


async def find_server_python(
    named: Path | None = None, environment: Mapping[str, str] | None = None
) -> ServerPython:
    """The Python for the server. Raises ServerError when none has sglang, saying what was looked at."""
    environment = os.environ if environment is None else environment
    candidates = [(named, "named with --server-python")] if named is not None else _candidates(environment)
    passed_over: list[str] = []
    for path, why in candidates:
        try:
            told = await _ask(path, environment, [], _DESCRIBE_LIMIT_S)
        except ServerError as error:
            passed_over.append(f"{path} ({why}): {error.why or error.what}")
            continue
        if told.get("sglang") is None or told.get("sglang_version") is None:
            passed_over.append(f"{path} ({why}): no sglang")
            continue
        return ServerPython(
            path=path,
            why=why,
            python=str(told["python"]),
            sglang_path=Path(str(told["sglang"])).parent,
            sglang_version=str(told["sglang_version"]),
            torch_version=_text(told.get("torch_version")),
            torch_cuda=_text(told.get("torch_cuda")),
            wants_torch=_text(told.get("wants_torch")),
            passed_over=tuple(passed_over),
        )
    raise ServerError(
        "no Python with sglang was found",
        why="; ".join(passed_over),
        next="name it with --server-python PATH, or install klbench with its extra: klbench[sglang]",
    )


async def server_flags(python: ServerPython, environment: Mapping[str, str] | None = None) -> Flags:
    """What this sglang's launcher takes, asked once per sglang and then kept in the user's cache folder."""
    environment = os.environ if environment is None else environment
    cache = _cache_file(python)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return _flags(json.loads(cache.read_text(encoding="utf-8")))
    told = await _ask(python.path, environment, ["flags"], _FLAGS_LIMIT_S)
    flags = told.get("flags")
    if not isinstance(flags, dict):
        raise ServerError(f"{python.path} did not say which options its sglang takes")
    with contextlib.suppress(OSError):
        _write_atomically(cache, json.dumps(flags))
    return _flags(flags)


def _flags(content: Mapping[str, Any]) -> Flags:
    return Flags(
        {
            str(option): None if choices is None else tuple(map(str, choices))
            for option, choices in content.items()
        }
    )


def _cache_file(python: ServerPython) -> Path:
    # An editable checkout changes without changing its version: the file that defines the options counts.
    stamps = []
    for name in ("srt/server_args.py", "srt/arg_groups", "version.py"):
        with contextlib.suppress(OSError):
            stamps.append(str((python.sglang_path / name).stat().st_mtime_ns))
    key = "\n".join([str(python.path), str(python.sglang_path), python.sglang_version, *stamps])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    root = os.environ.get("KLBENCH_CACHE") or platformdirs.user_cache_dir("klbench")
    return Path(root) / "server-flags" / f"{name}.json"


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".draft-", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


async def _ask(
    path: Path, environment: Mapping[str, str], arguments: list[str], limit_s: float
) -> dict[str, Any]:
    """What probe.py says under `path`. Raises ServerError with that Python's own words."""
    source = _PROBE.read_text(encoding="utf-8")
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(path), "-c", source, *arguments),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ServerError(f"cannot run {path}", why=error.strerror or str(error)) from None
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        raise ServerError(f"{path} did not answer within {limit_s:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    for line in out.decode("utf-8", errors="replace").splitlines():
        if line.startswith(_MARK):
            told = json.loads(line.removeprefix(_MARK))
            if isinstance(told, dict):
                return told
    own_words = err.decode("utf-8", errors="replace").strip().splitlines()
    why = own_words[-1] if own_words else f"exit code {process.returncode}"
    raise ServerError(f"{path} could not be asked for its sglang", why=why)
