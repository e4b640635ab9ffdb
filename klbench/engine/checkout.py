"""The git checkout that a package is imported from: its commit, what was edited, and what lies between two.

Read only. A package that git does not track (installed into a virtual environment inside some repository) has
no checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_GIT_LIMIT_S = 20.0
_MOST_FILES = 500
_MOST_COMMITS = 50
_LARGEST_FILE_BYTES = 8 << 20
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
"""Names of commits come out of logs: anything else could be an option of git's."""
_NO_PROGRAMS = (
    ("safe.bareRepository", "explicit"),
    ("core.fsmonitor", "false"),
    ("log.showSignature", "false"),
)
"""What a repository's own configuration must not make git run."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """`changed`: tracked files that differ from the commit, relative to `root`, with a hash of their content
    ("gone" for a removed file, "large" for one that was not hashed)."""

    root: Path
    commit: str
    subject: str
    changed: Mapping[str, str] = field(default_factory=dict)


async def read_checkout(package: Path) -> Checkout | None:
    """The checkout that tracks the package's files, None where there is none or git is missing."""
    if await run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    root = await run_git(package, "rev-parse", "--show-toplevel")
    head = await run_git(package, "log", "-1", "--format=%H %s")
    if root is None or head is None:
        return None
    commit, _, subject = head.strip().partition(" ")
    place = Path(root.strip())
    names = await run_git(place, "diff", "--name-only", "-z", "--no-ext-diff", "HEAD")
    files = sorted(name for name in (names or "").split("\0") if name)[:_MOST_FILES]
    hashes = await asyncio.to_thread(lambda: {name: _hash(place / name) for name in files})
    return Checkout(place, commit, subject, hashes)


async def commits_between(root: Path, before: str, after: str) -> list[str] | None:
    """The commits that `after` has and `before` has not, newest first; None where git cannot say."""
    if not (_COMMIT.fullmatch(before) and _COMMIT.fullmatch(after)):
        return None
    listed = await run_git(root, "log", f"-{_MOST_COMMITS}", "--format=%h %s", f"{before}..{after}", "--")
    return None if listed is None else [line for line in listed.split("\n") if line]


async def files_between(root: Path, before: str, after: str) -> list[str] | None:
    """The files that differ between the two commits; None where git cannot say."""
    if not (_COMMIT.fullmatch(before) and _COMMIT.fullmatch(after)):
        return None
    listed = await run_git(root, "diff", "--name-only", "-z", "--no-ext-diff", before, after, "--")
    return None if listed is None else [name for name in listed.split("\0") if name][:_MOST_FILES]


def _hash(file: Path) -> str:
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            return "large"
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return "gone"


async def run_git(place: Path, *arguments: str) -> str | None:
    """What git prints in `place`; None where it fails, is missing, or takes longer than 20 s."""
    safely = [word for name, value in _NO_PROGRAMS for word in ("-c", f"{name}={value}")]
    try:
        process = await asyncio.create_subprocess_exec(
            *("git", "-C", str(place), *safely, *arguments),
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _GIT_LIMIT_S)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return out.decode("utf-8", errors="replace") if process.returncode == 0 else None
